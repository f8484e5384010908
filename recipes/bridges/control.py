"""A control for what training gives: the same run, in which every attempt counts as no better and no worse than the others.

    palestra backends run skyrl recipes/bridges/control.py recipes/bridges/train.toml backend.kind=skyrl
    palestra backends run tinker recipes/bridges/control.py recipes/bridges/tinker.toml

verl has its own arithmetic; for it there is `tests/bridges/verl/zero_advantages.py`.
"""

import json
import sys
from collections.abc import Sequence

from palestra import advantage, train


def worthless(rewards: Sequence[float], _: object) -> list[float]:
    return [0.0] * len(rewards)


if __name__ == "__main__":
    advantage.advantages = worthless
    sys.stdout.write(json.dumps(train(*sys.argv[1:])) + "\n")
