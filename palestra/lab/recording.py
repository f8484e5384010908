"""A recorded run as the lab takes it: when each training rollout did what, and from when to when each step lasted.

Read from the run's ledger (never written to) and its metrics. Where a rollout was tried again, its last attempt counts. How long
things would take otherwise is for `fitting` and `replay`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

from palestra.config import Config, Training
from palestra.errors import UsageError
from palestra.ledger.ledger import describe_key
from palestra.ledger.packing import unpack
from palestra.ledger.store import Store
from palestra.runs import RunFolder
from palestra.trajectory import Trajectory, Turn

Interval = tuple[float, float]

MOST_CALLS = 50_000
"""Sampler calls that are replayed: of a longer run only the steps in its middle, as every what-if plays them all again."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the sampler."""

    time: Interval
    output: int
    new: int
    """Tokens that the sampler had not seen: the prompt at first, then what was read since the last reply."""


@dataclass(frozen=True, slots=True)
class Played:
    """One rollout's last attempt. A stage that it did not come to is None."""

    round: int
    task_id: str
    step: int
    """The step that took it."""
    gave: bool
    """Whether its group was trained on."""
    first: float
    """When its first attempt began."""
    tries: int
    init: Interval
    run: Interval | None
    reward: Interval | None
    calls: tuple[Call, ...] = ()
    tools: tuple[Interval, ...] = ()

    @property
    def end(self) -> float:
        return (self.reward or self.run or self.init)[1]

    def pieces(self) -> Iterator[tuple[str, Interval]]:
        """All of its time without a gap, by what it was spent on."""
        if self.first < self.init[0]:
            yield "failed attempts", (self.first, self.init[0])
        yield "init", self.init
        if self.run is not None:
            yield "waiting to run", (self.init[1], self.run[0])
            yield from self.run_pieces()
            if self.reward is not None:
                yield "waiting for reward", (self.run[1], self.reward[0])
                yield "reward", self.reward

    def run_pieces(self) -> Iterator[tuple[str, Interval]]:
        if self.run is None:
            return
        at = self.run[0]
        inside = [("sampling", call.time) for call in self.calls] + [("tools", tool) for tool in self.tools]
        for what, (start, end) in sorted(inside, key=lambda piece: piece[1]):
            yield "rest of the run", (at, start)
            yield what, (start, end)
            at = end
        yield "rest of the run", (at, self.run[1])


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    rollouts: tuple[Played, ...]

    @property
    def gave(self) -> bool:
        return any(rollout.gave for rollout in self.rollouts)

    @property
    def end(self) -> float:
        return max(rollout.end for rollout in self.rollouts)

    @property
    def place(self) -> tuple[int, float, str]:
        """Where it stood in the plan: groups are begun in that order."""
        return self.rollouts[0].round, min(rollout.first for rollout in self.rollouts), self.rollouts[0].task_id


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    groups: tuple[PlayedGroup, ...]
    begin: float
    collected: float
    """When the gradients of its last group were in."""
    end: float
    seconds: float
    training: tuple[Interval, ...]
    """When the gradients of each group that gave some were taken."""
    early: float = 0.0
    """Seconds that it was trained beside the pause before it; they count as its own."""
    pause: float = 0.0
    """Seconds for its checkpoint and evaluation, until the next step began."""

    @property
    def rollouts(self) -> list[Played]:
        return [rollout for group in self.groups for rollout in group.rollouts]


@dataclass(frozen=True)
class Recording:
    config: Config
    training: Training
    steps: tuple[Step, ...]
    others: tuple[tuple[str, Interval], ...]
    """Spans of rollouts that no replayed step took, such as evaluations: they were in the way of the others."""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def rollouts(self) -> list[Played]:
        return [rollout for step in self.steps for rollout in step.rollouts]


def read(folder: Path) -> Recording:
    run, config = RunFolder.reopen(folder)
    if config.training is None:
        raise UsageError(f"{folder} is no training run: its config has no section [training]")
    measured = {row["step"]: row for row in run.read_metrics() if {"seconds", "rollout_seconds"} <= row.keys()}
    ledger = _read_ledger(run.ledger)
    taken = {number: groups for number, groups in _by_step(ledger.rollouts).items() if number in measured}
    if not taken:
        if ledger.without_spans:
            raise UsageError(f"{folder}: its {ledger.without_spans} training rollouts have no recorded times; run it anew")
        raise UsageError(f"{folder} has no committed training step yet; `palestra plan` reads a run of `palestra train`")
    steps, notes = _steps(config.training, taken, measured)
    if not steps:
        raise UsageError(f"{folder}: no step is recorded from beginning to end; {'; '.join(notes)}")
    kept = _middle(steps)
    if len(kept) < len(steps):
        notes.append(
            f"of {len(steps)} steps, {len(kept)} in the middle were replayed: {kept[0].number + 1}–{kept[-1].number + 1}"
        )
    if ledger.without_spans:
        notes.append(f"{ledger.without_spans} rollouts without recorded times were left out")
    if config.training.oversample > 1:
        notes.append("groups that were abandoned are not replayed")
    replayed = {step.number for step in kept}
    others = [*ledger.others, *(piece for r in ledger.rollouts if r.step not in replayed for piece in _stages(r))]
    return Recording(config, config.training, tuple(kept), tuple(others), tuple(notes))


@dataclass
class _Ledger:
    rollouts: list[Played] = field(default_factory=list)
    others: list[tuple[str, Interval]] = field(default_factory=list)
    without_spans: int = 0


def _read_ledger(path: Path) -> _Ledger:
    """All that has spans. Tokens are left on the disk: where replies stand in their segment says how many there were."""
    found = _Ledger()
    columns = "phase, step, task_id, idx, state, settled_by, reward, stop, body"
    with closing(Store(path, read_only=True)) as store:
        for (number,) in store.rows("SELECT id FROM trajectories ORDER BY id"):
            [row] = store.rows(f"SELECT {columns} FROM trajectories WHERE id = ?", number)
            phase, round_, task, index, state, step, reward, stop, body = row
            with store.whole(describe_key(phase, round_, task, index)):
                trajectory = unpack(task.decode("utf-8", "surrogatepass"), index, reward, stop, body, ())
            if phase != "train" or step is None:
                found.others += [(what, (start, end)) for what, start, end in trajectory.spans]
            elif (played := _played(trajectory, round_, step, gave=state == "consumed")) is not None:
                found.rollouts.append(played)
            else:
                found.without_spans += 1
    return found


def _played(trajectory: Trajectory, round_: int, step: int, gave: bool) -> Played | None:
    """None where a stage that it went through was not recorded."""
    inits = [at for at, span in enumerate(trajectory.spans) if span.what == "init"]
    if not inits:
        return None
    last: dict[str, list[Interval]] = defaultdict(list)
    for what, start, end in trajectory.spans[inits[-1] :]:
        last[what].append((start, end))
    run, reward = (last[stage][-1] if last[stage] else None for stage in ("run", "reward"))
    if trajectory.failure is None and (run is None or reward is None):
        return None
    return Played(
        round_,
        trajectory.task_id,
        step,
        gave,
        first=trajectory.spans[inits[0]].start,
        tries=1 + len(trajectory.retried),
        init=last["init"][-1],
        run=run,
        reward=reward,
        calls=tuple(_calls(last["sample"], trajectory.turns)),
        tools=tuple(last["tool"]),
    )


def _calls(times: Sequence[Interval], turns: Sequence[Turn]) -> Iterator[Call]:
    read: dict[int, int] = {}
    for time, turn in zip_longest(times, turns):
        if time is None:
            return
        if turn is None:  # the context had no room for another reply
            yield Call(time, 0, 0)
        else:
            start, end = turn.span
            yield Call(time, end - start, max(0, start - read.get(turn.segment, 0)))
            read[turn.segment] = end


def _by_step(rollouts: Iterable[Played]) -> dict[int, list[PlayedGroup]]:
    groups: dict[tuple[int, int, str], list[Played]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.step, rollout.round, rollout.task_id].append(rollout)
    steps: dict[int, list[PlayedGroup]] = defaultdict(list)
    for (step, _, _), members in sorted(groups.items()):
        steps[step].append(PlayedGroup(tuple(sorted(members, key=lambda rollout: rollout.init))))
    return steps


def _steps(plan: Training, taken: Mapping[int, list[PlayedGroup]], measured: Mapping[int, Any]) -> tuple[list[Step], list[str]]:
    """The steps that can be replayed, with the time between them; and how many can not."""
    steps: list[Step] = []
    after = -inf
    for number, groups in sorted(taken.items()):
        if plan.oversample > 1:  # then a step also settles what had ended of groups that were abandoned, in it or just before it
            groups = [group for group in groups if len(group.rollouts) == plan.samples] or groups
        if not plan.refill:
            groups = sorted(groups, key=lambda group: (group.gave, group.end))[-plan.groups :]
        step = _step(number, groups, measured[number], after)
        steps.append(step)
        after = step.end
    begins = {step.number: step.begin for step in steps}
    whole = [step for step in steps if not _interrupted(step, begins.get(step.number - plan.staleness, -inf), plan)]
    out = [str(step.number + 1) for step in steps if step not in whole]
    notes = [f"left out, since the run was interrupted in it: step {', '.join(out)}"] if out else []
    following = {step.number: step for step in whole}
    for at, step in enumerate(whole):
        if step.number + 1 in following:
            then = following[step.number + 1]
            whole[at] = replace(step, pause=max(0.0, then.begin + then.early - step.end))
    return whole, notes


def _step(number: int, groups: Sequence[PlayedGroup], row: Mapping[str, Any], after: float) -> Step:
    """Metrics say how long a step took, and not when. Its last group was taken when it was complete, or when those before it
    were; from there its times are counted back and on."""
    training: list[Interval] = []
    share = row.get("train_seconds", 0.0) / max(1, sum(group.gave for group in groups))
    at = after
    for group in sorted(groups, key=lambda group: group.end):
        at = max(at, group.end)
        if group.gave:
            training.append((at, at + share))
            at += share
    begin = max(at - row["rollout_seconds"], after)
    if after == -inf:  # the first step's time counts from its first span: tasks may have been prepared before it
        begin = max(begin, min(rollout.first for group in groups for rollout in group.rollouts))
    update = row.get("update_seconds", row["seconds"] - row["rollout_seconds"])
    seconds = at + update - begin if after == -inf else row["seconds"]
    return Step(number, tuple(groups), begin, at, at + update, seconds, tuple(training), row.get("early_seconds", 0.0))


def _interrupted(step: Step, soonest: float, plan: Training) -> bool:
    """Whether it took rollouts of an earlier process, whose time it does not count; or too few are recorded."""
    runs = [rollout.run[0] for rollout in step.rollouts if rollout.run is not None]
    few = len(step.groups) < plan.groups or not runs
    # When a step began is known only as far as how its gradients were spread over it.
    slop = 0.05 + 0.1 * step.seconds + sum(end - start for start, end in step.training)
    return few or min(runs) < soonest - slop


def _middle(steps: Sequence[Step]) -> list[Step]:
    """As many steps in a row as may be replayed, from the middle of the run; always one."""
    calls = [sum(len(rollout.calls) for rollout in step.rollouts) for step in steps]
    low, high = 0, len(steps)
    while high - low > 1 and sum(calls[low:high]) > MOST_CALLS:
        low, high = (low + 1, high) if (high - low) % 2 else (low, high - 1)
    return list(steps[low:high])


def _stages(rollout: Played) -> Iterator[tuple[str, Interval]]:
    yield "init", rollout.init
    if rollout.reward is not None:
        yield "reward", rollout.reward
    for call in rollout.calls:
        yield "sample", call.time
