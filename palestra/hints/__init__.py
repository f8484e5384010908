"""Hints: short remarks on what the agent just did, appended to what it observes, so they are never trained on.

Few are said, each is logged in the trajectory with its effect, and the config can switch them off, wholly or in part. All state
is in the trajectory: one `Hints` serves every rollout of a run.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from palestra import config
from palestra.hints.rules import REPEATS, RULES, Rule, Scene, repeats
from palestra.hints.steps import appended, steps_of
from palestra.message import Message, Text, ToolCall, assistant, user
from palestra.protocols import Renderer
from palestra.tool import Finish, Schema
from palestra.trajectory import Hint, Key, Trajectory

PER_EPISODE = 8
TOKENS = 120
APART = 3
"""Turns from one hint to the next, unless a rule is urgent."""
HORIZON = 3
"""Turns within which a hint is heeded or not."""


@dataclass(frozen=True)
class Hints:
    settings: config.Hints
    rules: Sequence[Rule]
    turns: int
    context: int
    write: Callable[[ToolCall], str]
    """A call as the model's family writes it."""
    count: Callable[[str], int]
    """A text's tokens."""

    def for_group(self, seed: int, key: Key) -> "Hints | None":
        """Itself, or None. All attempts of a group get hints or none does, since they are compared with one another."""
        if key.phase != "train" and not self.settings.evaluation:
            return None
        chance = random.Random(f"{seed}/hints/{key.phase}/{key.step}/{key.task_id}").random()
        return self if chance < self.settings.share else None

    def stuck(self, trajectory: Trajectory) -> bool:
        """Whether the agent goes on repeating itself, in spite of what it was told."""
        return any(rule.name == "repeat" for rule in self.rules) and repeats(steps_of(trajectory)) >= REPEATS[-1]

    def give(self, trajectory: Trajectory, tools: Sequence[Schema]) -> str | None:
        """Append a hint to the last turn's results, where a rule has one and the budget allows it, and say what was appended."""
        said = self._choose(trajectory, tools, None)
        if said is None:
            return None
        turn = trajectory.turns[-1]
        turn.results = (*turn.results[:-1], _with(turn.results[-1], appended(said)))
        return said

    def reconsider(self, finish: Finish, trajectory: Trajectory, tools: Sequence[Schema]) -> str | None:
        """What to say instead of ending the run, if anything."""
        return self._choose(trajectory, tools, finish)

    def conclude(self, trajectory: Trajectory) -> None:
        """Note, when the run has ended, which hints were heeded."""
        steps = steps_of(trajectory)
        rules = {rule.name: rule for rule in RULES}
        for number, hint in enumerate(trajectory.hints or ()):
            before, after = steps[: hint.turn + 1], steps[hint.turn + 1 :][:HORIZON]
            heeded = rules[hint.rule].heeded(before, after) if after else None  # type: ignore[index]  # it is one of them
            assert trajectory.hints is not None
            trajectory.hints[number] = replace(hint, heeded=heeded)

    def _choose(self, trajectory: Trajectory, tools: Sequence[Schema], finish: Finish | None) -> str | None:
        given, now = trajectory.hints, len(trajectory.turns) - 1
        if given is None or len(given) >= PER_EPISODE or now + 1 >= self.turns or (given and given[-1].turn == now):
            return None
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        scene = Scene(steps_of(trajectory), trajectory, parameters, self.turns, self.context, self.write, finish)
        for rule in self.rules:
            if sum(hint.rule == rule.name for hint in given) >= rule.times:
                continue
            if given and now - given[-1].turn < APART and not rule.urgent:
                continue
            if (rule.name == "no_change") == (finish is not None) and (text := rule.says(scene)) is not None:
                text = self._cut(text)
                given.append(Hint(now, rule.name, text))
                return text
        return None

    def _cut(self, text: str) -> str:
        """As much of it as the budget allows: most hints fit, quoted lines may not."""
        if self.count(text) <= TOKENS:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.count(text[:middle] + "…") <= TOKENS else (low, middle - 1)
        return text[:low] + "…"


def make(settings: config.Hints, turns: int, context: int, renderer: Renderer | None) -> Hints | None:
    """The hints that a config asks for; None when they are off."""
    rules = [rule for rule in RULES if settings.rules == "on" or rule.name in settings.rules]
    if settings.rules == "off" or not rules:
        return None
    return Hints(settings, rules, turns, context, _writer(renderer), _counter(renderer))


def _writer(renderer: Renderer | None) -> Callable[[ToolCall], str]:
    def write(call: ToolCall) -> str:
        if renderer is None:
            return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        tokens = renderer.reply(assistant("", call))
        return renderer.decode([token for token in tokens if token not in renderer.stop_ids]).strip()

    return write


def _counter(renderer: Renderer | None) -> Callable[[str], int]:
    if renderer is None:
        return lambda text: len(text.encode()) // 3  # which is more than most tokenizers take
    follow = renderer.follow
    return lambda text: len(follow("stop", [user(text)])) - len(follow("stop", [user("")]))


def _with(result: Message, text: str) -> Message:
    content = result.content + text if isinstance(result.content, str) else (*result.content, Text(text))
    return replace(result, content=content)
