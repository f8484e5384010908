"""What an agent did, in the terms that hints are about: looking, searching, editing, failing. Read from the trajectory alone."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.message import ToolCall
from palestra.reminders import without
from palestra.tool import ERROR
from palestra.trajectory import Trajectory, Turn

SYMBOL_SEARCHES = ("search_symbol", "find_references", "file_outline", "get_dependencies")
SEARCHES = (*SYMBOL_SEARCHES, "search_text")
EDITS = ("edit", "create")

_GREPS = {"grep", "egrep", "fgrep", "rg", "ag", "ack", "find"}
_READS = {"cat", "head", "tail", "less", "more", "nl", "sed"}
_BY_THE_WAY = {"cd", "set", "export", "pwd", "echo", "ls"}
_WRITES = re.compile(
    r"\bsed\b[^|;&\n]*\s(-[a-zA-Z]*i|--in-place)|\b(patch|tee|apply_patch)\b|\bgit apply\b|\.write(_text|_bytes)?\("
    r"|(?<![0-9&<>=-])>>?\s*(?!/dev/null|[&>(])[\w./~$\"'{-]"
)
_EMPTY = re.compile(r"\s*(\[exit code [01]\]\s*)?\Z|No (definition|class|function|method|variable|line) ")


@dataclass(frozen=True, slots=True)
class Done:
    """One call and what came of it."""

    call: ToolCall
    result: str

    @property
    def failed(self) -> bool:
        return self.result.startswith(ERROR)

    @property
    def path(self) -> str:
        return str(self.call.arguments.get("path", ""))

    @property
    def edits(self) -> bool:
        """A change of files that went through, by an editing tool or, as far as can be seen, by the shell."""
        return not self.failed and (self.call.name in EDITS or bool(_WRITES.search(self._command)))

    @property
    def searches_symbols(self) -> bool:
        return self.call.name in SYMBOL_SEARCHES

    @property
    def searches(self) -> bool:
        return self.call.name in SEARCHES or self._does(_GREPS)

    @property
    def looks(self) -> bool:
        """A text search, or a file read."""
        return self.call.name in ("view", "search_text") or (self._does(_GREPS | _READS) and not _WRITES.search(self._command))

    @property
    def found_nothing(self) -> bool:
        return self.searches and bool(_EMPTY.match(self.result))

    @property
    def _command(self) -> str:
        return str(self.call.arguments.get("command", "")) if self.call.name == "bash" else ""

    def _does(self, programs: set[str]) -> bool:
        """Whether the shell only ran such programs; what they are piped into does not count."""
        first = (part.split(maxsplit=1)[0] for part in re.split(r"&&|\|\||[;\n]", self._command) if part.strip())
        run = {word for word in first if word not in _BY_THE_WAY}
        return bool(run) and run <= programs


@dataclass(frozen=True, slots=True)
class Step:
    """One turn."""

    done: tuple[Done, ...]

    @property
    def signature(self) -> str:
        """Equal for turns with the same calls and the same results; empty for turns without calls."""
        said = [(d.call.name, dict(d.call.arguments), d.call.fault, d.result) for d in self.done]
        return json.dumps(said, sort_keys=True, default=str) if said else ""


def appended(hint: str) -> str:
    """A hint as it stands behind a result."""
    return f"\n\nHint: {hint}"


def steps_of(trajectory: Trajectory) -> list[Step]:
    """Every turn so far, without the hints that results carry."""
    hints = {hint.turn: appended(hint.text) for hint in trajectory.hints or ()}
    return [_step(turn, hints.get(number, "")) for number, turn in enumerate(trajectory.turns)]


def _step(turn: Turn, hint: str) -> Step:
    results = [without(result.text) for result in turn.results if result.role == "tool"]
    if results and hint:
        results[-1] = results[-1].removesuffix(hint)
    results += [""] * (len(turn.message.calls) - len(results))
    return Step(tuple(Done(call, result) for call, result in zip(turn.message.calls, results, strict=False)))


def calls_of(steps: Sequence[Step]) -> list[Done]:
    return [done for step in steps for done in step.done]
