"""Rewards: scorers, one file each in `scorers/`, and the service that runs and weighs them and isolates what fails.

scorer.py          the contract: what a scorer sees and returns
service.py         RewardService: every scorer over a batch, weighted
outcome.py         what became of a sample; a batch that raises, bisected
time_limit.py      a scorer in processes of its own, whose program is scorer_process.py
tries.py           requests to a server: bounded in tries, time and size
http/              scorers over HTTP: the server, and the client that a run has
chat.py            questions to a model over an OpenAI-compatible URL
patterns.py        regular expressions of a recipe
"""
