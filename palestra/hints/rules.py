"""The rules, as data: each looks at what the agent did and says a hint or nothing, and knows afterwards whether it was heeded.

A rule sees the trajectory, the tools' schemas and the run's limits. It never sees a task's gold solution or its hidden tests.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from palestra.config.hints import RuleName
from palestra.hints.steps import EDITS, SYMBOL_SEARCHES, Step, calls_of
from palestra.message import JSON, ToolCall
from palestra.tool import Finish
from palestra.trajectory import Trajectory, Turn

LOOKS = 3
EMPTY = 2
FAILED_EDITS = 2
REPEATS = (2, 3, 4)
"""The same call with the same result: a hint, a stronger one, the end."""
EDIT_BY = 0.6
TURNS_LEFT = 3
CONTEXT_USED = 0.85


@dataclass(frozen=True)
class Scene:
    """What a rule sees, just after the last turn's calls have run."""

    steps: Sequence[Step]
    trajectory: Trajectory
    tools: Mapping[str, Mapping[str, JSON]]
    """The parameters of each tool, by its name."""
    turns: int
    context: int
    write: Callable[[ToolCall], str]
    """A call as this model family writes it."""
    finish: Finish | None = None
    """What the agent would end with."""

    @property
    def last(self) -> Step:
        return self.steps[-1]


@dataclass(frozen=True)
class Rule:
    name: RuleName
    says: Callable[[Scene], str | None]
    heeded: Callable[[Sequence[Step], Sequence[Step]], bool]
    """Given the turns up to the hint and the next ones (at most three)."""
    urgent: bool = False
    """Its moment does not come again, so it does not keep the distance from the hint before."""
    times: int = 2


def _unreadable(scene: Scene) -> str | None:
    broken = next((done.call for done in scene.last.done if done.call.fault is not None), None)
    if broken is None or not scene.tools:
        return None
    name = broken.name if broken.name in scene.tools else next(iter(scene.tools))
    return (
        f"Write a call of {_signature(scene, name)} exactly like this:\n{scene.write(ToolCall('', name, _example(scene, name)))}"
    )


def _unknown(scene: Scene) -> str | None:
    for done in scene.last.done:
        name = done.call.name
        if done.call.fault is not None:
            continue
        if name not in scene.tools:
            return _no_such_tool(scene, name)
        known = scene.tools[name].get("properties", {})
        for argument in done.call.arguments:
            if argument not in known:
                meant = difflib.get_close_matches(argument, known, n=1, cutoff=0.4)
                say = f"; you may mean {meant[0]!r}" if meant else ""
                return f"{name} has no argument {argument[:40]!r}{say}. It is called as {_signature(scene, name)}."
    return None


def _reading(scene: Scene) -> str | None:
    known = [name for name in SYMBOL_SEARCHES if name in scene.tools]
    looks = len(list(takewhile(lambda done: done.looks, reversed(calls_of(scene.steps)))))
    if looks < LOOKS or not known or not scene.last.done:
        return None
    uses = {
        "search_symbol": "where a name is defined",
        "find_references": "where it is used",
        "file_outline": "what a file holds",
        "get_dependencies": "what imports what",
    }
    return "Instead of reading on, ask: " + ", ".join(f"{name} says {uses[name]}" for name in known) + "."


def _empty(scene: Scene) -> str | None:
    searches = [done for done in calls_of(scene.steps) if done.searches][-EMPTY:]
    if len(searches) < EMPTY or not all(done.found_nothing for done in searches) or searches[-1] not in scene.last.done:
        return None
    return (
        f"{EMPTY} searches found nothing. Search for a shorter part of the name, without its case or suffix, or list the files."
    )


def _edits(scene: Scene) -> str | None:
    for done in scene.last.done:
        tried = [other for other in calls_of(scene.steps) if other.call.name == "edit" and other.path == done.path]
        if done.call.name == "edit" and len(tried) >= FAILED_EDITS and all(edit.failed for edit in tried[-FAILED_EDITS:]):
            lines = re.findall(r"^ *\d+\t.*$", done.result, re.M)
            now = " These lines are in it now:\n" + "\n".join(lines[:8]) if lines else " View the lines first."
            return f"{FAILED_EDITS} edits of {done.path} failed: old must be the file's own text, to the letter.{now}"
    return None


def repeats(steps: Sequence[Step]) -> int:
    """How many turns in a row, up to the last, had the same calls and the same results."""
    if not steps or not (last := steps[-1].signature):
        return 0
    return len(list(takewhile(lambda step: step.signature == last, reversed(steps))))


def _repeat(scene: Scene) -> str | None:
    match repeats(scene.steps):
        case 2:
            return "The same call gave the same result as before. Do something else."
        case 3:
            return "This is the third time. It will not change: once more, and the work ends here, unfinished. Try another way."
    return None


def _cycle(scene: Scene) -> str | None:
    signatures = [step.signature for step in scene.steps[-4:]]
    if len(signatures) < 4 or "" in signatures or signatures[:2] != signatures[2:] or signatures[0] == signatures[1]:
        return None
    return "You go back and forth between the same two calls, and their results do not change. Do something else."


def _no_edit(scene: Scene) -> str | None:
    known = [name for name in EDITS if name in scene.tools]
    used = len(scene.steps)
    if not known or used < EDIT_BY * scene.turns or any(done.edits for done in calls_of(scene.steps)):
        return None
    return (
        f"{used} of {scene.turns} turns are used, and nothing is changed yet. Make a first change with {known[0]}, then test it."
    )


def _ending(scene: Scene) -> str | None:
    used = len(scene.steps)
    if scene.turns - used == TURNS_LEFT and used > TURNS_LEFT:
        return f"{TURNS_LEFT} turns are left. Complete the change, and hand in."
    now, before = (turn.span[1] if turn.segment == len(scene.trajectory.segments) - 1 else 0 for turn in _last_two(scene))
    if before < CONTEXT_USED * scene.context <= now:
        return f"About {max(0, scene.context - now):,} tokens are left. Read no more, complete the change, and hand in."
    return None


def _last_two(scene: Scene) -> Sequence[Turn]:
    last = scene.trajectory.turns[-1]
    return last, scene.trajectory.turns[-2] if len(scene.trajectory.turns) > 1 else replace(last, span=(0, 0))


def _no_change(scene: Scene) -> str | None:
    if scene.finish is None or scene.finish.changed is not False:
        return None
    return "You have changed nothing. If that is right, finish again; else make the change first."


def _no_such_tool(scene: Scene, name: str) -> str:
    known = _MEANT.get(name.lower(), ())
    meant = next((tool for tool in known if tool in scene.tools), None)
    meant = meant or next(iter(difflib.get_close_matches(name[:80], scene.tools, n=1, cutoff=0.4)), None)
    say = f"use {_signature(scene, meant)}" if meant else f"the tools are {', '.join(scene.tools)}"
    return f"There is no tool {name[:40]!r}: {say}."


# What other agents' tools are called, and what serves here.
_MEANT = {
    "grep": ("search_text", "bash"),
    "rg": ("search_text", "bash"),
    "find": ("search_symbol", "bash"),
    "search": ("search_symbol", "search_text", "bash"),
    "cat": ("view", "bash"),
    "open": ("view",),
    "read_file": ("view",),
    "ls": ("bash",),
    "shell": ("bash",),
    "terminal": ("bash",),
    "execute": ("bash",),
    "python": ("bash",),
    "str_replace": ("edit",),
    "str_replace_editor": ("edit",),
    "replace": ("edit",),
    "write_file": ("create",),
    "submit": ("finish",),
    "done": ("finish",),
}


def _signature(scene: Scene, name: str) -> str:
    parameters = scene.tools[name]
    required = parameters.get("required", ())
    listed = (
        f"{argument}: {about.get('type', 'value')}" + ("" if argument in required else " (optional)")
        for argument, about in parameters.get("properties", {}).items()
    )
    return f"{name}({', '.join(listed)})"


def _example(scene: Scene, name: str) -> dict[str, JSON]:
    values: dict[str, JSON] = {"string": "…", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    parameters = scene.tools[name]
    known = parameters.get("properties", {})
    return {argument: values.get(known.get(argument, {}).get("type"), "…") for argument in parameters.get("required", ())}


# Whether a hint was heeded


def _next_calls_work(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return bool(after[0].done) and all(done.call.fault is None for done in after[0].done)


def _next_is_known(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return bool(after[0].done) and not any(done.failed and _UNKNOWN.search(done.result) for done in after[0].done)


_UNKNOWN = re.compile(r"\AError: (unknown tool|\w+: .*unknown argument)")


def _edited(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return any(done.edits for done in calls_of(after))


def _edited_or_viewed(before: Sequence[Step], after: Sequence[Step]) -> bool:
    path = next(done.path for done in reversed(calls_of(before)) if done.call.name == "edit" and done.failed)
    return any(not done.failed and done.path == path and done.call.name in ("view", *EDITS) for done in calls_of(after))


def _another_call(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return after[0].signature != before[-1].signature


def _out_of_the_cycle(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return after[0].signature not in (before[-1].signature, before[-2].signature)


def _searched_symbols(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return any(done.searches_symbols for done in calls_of(after))


def _found(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return any(done.searches and not done.found_nothing and not done.failed for done in calls_of(after))


def _edited_or_finished(before: Sequence[Step], after: Sequence[Step]) -> bool:
    return any(done.edits or done.call.name == "finish" for done in calls_of(after))


# The first that has something to say, says it.
RULES = (
    Rule("unreadable", _unreadable, _next_calls_work),
    Rule("unknown", _unknown, _next_is_known),
    Rule("repeat", _repeat, _another_call, urgent=True),
    Rule("cycle", _cycle, _out_of_the_cycle),
    Rule("edits", _edits, _edited_or_viewed),
    Rule("ending", _ending, _edited_or_finished, urgent=True),
    Rule("empty", _empty, _found),
    Rule("reading", _reading, _searched_symbols),
    Rule("no_edit", _no_edit, _edited),
    Rule("no_change", _no_change, _edited, urgent=True, times=1),
)
