"""Palestra: train and evaluate multi-turn, long-horizon LLM agents with reinforcement learning."""
