"""Measurements as ratios against a peer or a limit in the same run, in CPU-seconds, since machines are shared and noisy."""

import palestra.backends.torch  # noqa: F401  # before torch: it says how threads wait
