"""Rewards: scorers, one file each in `scorers/`, and the service that runs and weighs them and isolates what fails."""
