"""How fast newcomers come to an engine whose contexts want more KV than there is.

Room that opens is soon wanted by those who are there: a context grows to ten times the length that it starts with. Whoever
fills it with newcomers gets a cohort that grows and ends together, and loses its KV in between. So newcomers come at an even
pace, that at which full KV brings contexts to their end, corrected slowly until contexts want a little more than there is.
"""

REVIEW_SECONDS = 1.0
SURPLUS = 0.05
"""Contexts are to want so much more KV than there is, as a share of it: who waits for KV fills what others leave."""
MEMORY_SECONDS = 1000.0
"""The surplus is an average over about so long, longer than a context lives: what can be seen at once comes of old decisions."""
GAIN = 2.0
SLOWEST, FASTEST = 0.85, 1.25
"""Limits of the correction."""
CATCH_UP = 1.3
"""Times the pace at which newcomers come who are late, and at which those are made up for who came early."""
LATE = 0.15
"""Newcomers that may be owed, or come early, as a share of the contexts under way; what is beyond is forgotten."""


class Inflow:
    """Whoever asks `due` lets a newcomer in, and says so with `came`."""

    def __init__(self) -> None:
        self._tokens_held = 0.0
        """KV in use, times engine steps."""
        self._steps = self._seconds = 0.0
        """Since the start, or the last review."""
        self._surplus = SURPLUS
        self._owed = self._spaced = 0.0

    def start(self) -> None:
        """From now on newcomers have a pace."""
        self._steps = self._seconds = 0.0

    @property
    def due(self) -> bool:
        """Whether the next newcomer's time has come."""
        return self._owed >= 1 and self._spaced >= 1

    def came(self) -> None:
        self._owed -= 1
        self._spaced -= 1

    def elapse(self, seconds: float, steps: float, used: int) -> bool:
        """The engine went on for so long, with so much KV in use. True when it is time for a review."""
        self._tokens_held += used * steps
        if steps:
            self._steps += steps
            self._seconds += seconds
        return self._seconds >= REVIEW_SECONDS

    def review(self, kv_tokens: int, wanted: int, under_way: int, ended: int) -> None:
        """Bring the pace up to date: so many contexts are under way, which want so much KV, and so many have ended so far."""
        surplus = wanted / kv_tokens - 1
        self._surplus += (surplus - self._surplus) * min(1.0, self._seconds / MEMORY_SECONDS)
        correction = min(FASTEST, max(SLOWEST, 1 - GAIN * (self._surplus - SURPLUS)))
        usual = self._tokens_held / (ended + under_way / 2)  # those under way are in the middle of it
        newcomers = correction * kv_tokens * self._steps / usual
        late = LATE * under_way
        self._owed = min(late, max(-late, self._owed + newcomers))
        at_once = max(2.0, CATCH_UP * newcomers)
        self._spaced = min(at_once, self._spaced + CATCH_UP * newcomers)
        self._steps = self._seconds = 0.0
