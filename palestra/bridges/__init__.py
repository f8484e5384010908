"""Trainers that drive us: they own the loop, the weights and the servers, and ask our agent for rollouts."""
