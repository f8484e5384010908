"""Schedules compared on a virtual clock: one RL job's inits, runs, rewards and training, with times drawn from a workload.
Dispatchers are the real ones; only what they wait for is simulated.
"""
