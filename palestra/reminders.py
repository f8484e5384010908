"""What is left of a run's turns and tokens, told to the agent behind a turn's results. It is observed, so never trained on."""

import re
from dataclasses import replace

from palestra.message import Text
from palestra.trajectory import Trajectory

_SAID = re.compile(r"\n\n\[\d+ of \d+ turns and about [\d,]+ tokens are left\]\Z")


def remind(trajectory: Trajectory, every: int, turns: int, context: int) -> str | None:
    """Append it to the last turn's results, when it is time: every so many turns (0: never), and before the last one."""
    turn, used = trajectory.turns[-1], len(trajectory.turns)
    if not every or used >= turns or (used % every and turns - used != 1):
        return None
    said = f"[{turns - used} of {turns} turns and about {max(0, context - turn.span[1]):,} tokens are left]"
    *others, last = turn.results
    behind = f"\n\n{said}"
    content = last.content + behind if isinstance(last.content, str) else (*last.content, Text(behind))
    turn.results = (*others, replace(last, content=content))
    return said


def without(text: str) -> str:
    """A result as the tool gave it."""
    return _SAID.sub("", text)
