"""Scorers over HTTP: one process holds several on one device, and any number of runs ask it.

RemoteScorer -> client.py -> msgpack (protocol.py) -> server.py -> fleet.py -> batching.py -> scorer -> the way back

protocol.py       what goes over the wire: samples there, outcomes back; no pickle
media.py          pictures, videos and sounds of it, raw or as files
client.py         chunks, bounded retries, several servers
config.py         what a server reads: scorers, address, limits
batching.py       threads that own a scorer's device, and batches for them
selftest.py       a scorer must order its examples before it is served
other_python.py   a scorer of another environment
fleet.py          the scorers of a server: loaded, tried, asked, put aside
server.py         the end points
"""
