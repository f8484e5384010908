"""SkyRL-train drives Palestra: its trainer asks our generator for rollouts, which a dispatcher of ours runs on its engines."""

import os
import sys
import typing

import typing_extensions

os.environ.setdefault("TQDM_DISABLE", "1")  # its progress bars would cut through ours

if sys.version_info < (3, 12):
    # Pydantic refuses the older TypedDict, which SkyRL takes its request types from.
    typing.TypedDict = typing_extensions.TypedDict
