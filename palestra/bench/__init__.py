"""Measurements as ratios against a peer or a limit in the same run, in CPU-seconds, since machines are shared and noisy."""
