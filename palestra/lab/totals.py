"""What an engine has done so far, added up."""

from dataclasses import dataclass

from palestra.lab.kv import Kv


@dataclass(slots=True)
class Totals:
    prefilled: int = 0
    prefilled_again: int = 0
    """Of those, tokens whose KV had been there before, or was lost before all of it was there."""
    decoded: int = 0
    unit_seconds: float = 0.0
    """Seconds with at least one sequence in the step, times the units at work."""
    unit_steps: float = 0.0
    """Steps, times the units at work."""
    held: float = 0.0
    """The same, times the share of KV that contexts held."""
    idle: float = 0.0
    """Of that, what was held by contexts that were not served: they waited for a tool, or for room."""
    chunks: float = 0.0
    """Prefilled, each in a step of its context."""
    peak_contexts: int = 0
    """Most contexts that held KV at once."""

    @property
    def empty(self) -> float:
        """Unit-steps, times the share of KV that nobody held."""
        return self.unit_steps - self.held

    def count(self, seconds: float, steps: float, units: int, kv: Kv, prefilling: int) -> None:
        """So many steps on so many units, with sequences in them and KV as it is."""
        self.unit_seconds += seconds * units
        self.unit_steps += steps * units
        self.held += steps * units * kv.used / kv.tokens
        self.idle += steps * units * kv.idle_tokens / kv.tokens
        self.chunks += steps * prefilling
