"""The advisor: where the time of a recorded run went, and what each change would have saved, by playing it again in the lab."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from palestra.config import AnyDispatch, BatchDispatch, BoundedDispatch, PipelineDispatch, StreamDispatch
from palestra.gantt import draw
from palestra.lab.fitting import SamplerFit, StageFit, Timeline
from palestra.lab.model import Model, model_of
from palestra.lab.recording import Interval, Recording, Step, read
from palestra.lab.replay import Times, replay

LEAST_SAVING = 0.01
"""What saves less is not shown."""

TOLERANCE = 0.15
"""A replay that is further off than this is said to be a rough guide."""

LOOSE = 0.3
"""How far sampler calls may be off, against the mean call, before it is said."""


@dataclass(frozen=True, slots=True)
class Busy:
    """How a resource was used while steps went on."""

    resource: str
    share: float
    """Of the time, with at least one rollout in it."""
    mean: float
    """Rollouts in it at once, on average."""
    limit: int | None
    """How many the dispatcher lets in."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    change: str
    seconds: float
    saving: float
    """Of the replayed time."""


@dataclass(frozen=True)
class Plan:
    run: str
    steps: int
    rollouts: int
    retried: int
    dispatch: str
    staleness: int
    recorded: float
    """Seconds of all its steps."""
    replayed: float
    """The same in the lab, on the same schedule."""
    critical_path: dict[str, float]
    """What the rollout that was last in each step spent its step's time on, as shares that make 1; the largest first."""
    busy: list[Busy]
    what_if: list[WhatIf]
    """Those that save something, the largest saving first."""
    fits: dict[str, StageFit | SamplerFit]
    notes: list[str]
    picture: str | None

    @property
    def error(self) -> float:
        """By how much the replay is off."""
        return self.replayed / self.recorded - 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"error": self.error}


def plan(run: Path, picture: Path | None = None) -> Plan:
    """Read a run, play it again as it was and with one change at a time, and draw a step from its middle."""
    recording = read(run)
    if picture is not None:
        draw(recording.steps[len(recording.steps) // 2], picture)
    model = model_of(recording)
    section, staleness = recording.config.dispatch, recording.training.staleness
    replayed = replay(model, section, staleness)
    made = Plan(
        run=str(run),
        steps=len(recording.steps),
        rollouts=len(recording.rollouts),
        retried=sum(rollout.tries > 1 for rollout in recording.rollouts),
        dispatch=_describe(section),
        staleness=staleness,
        recorded=recording.seconds,
        replayed=replayed,
        critical_path=_critical_path(recording),
        busy=_busy(recording),
        what_if=_what_if(model, recording, replayed),
        fits={"init": model.parts.init, "reward": model.parts.reward, "sampler": model.parts.sampler},
        notes=list(recording.notes),
        picture=str(picture) if picture is not None else None,
    )
    made.notes.extend(_doubts(made, model, _most_calls(recording)))
    return made


def _describe(section: AnyDispatch) -> str:
    limits = ", ".join(f"{key} {value}" for key, value in _limits(section).items())
    return f"{section.kind} ({limits})" if limits else section.kind


def _limits(section: AnyDispatch) -> dict[str, int]:
    """How many rollouts a dispatcher lets into each stage."""
    match section:
        case BatchDispatch():
            return {}
        case BoundedDispatch():
            return {"slots": section.slots}
        case PipelineDispatch() | StreamDispatch():
            return {"init": section.init, "run": section.run, "reward": section.reward}


def _most_calls(recording: Recording) -> int:
    """Sampler calls under way at once, at the most."""
    calls = [call.time for rollout in recording.rollouts for call in rollout.calls]
    ends = sorted([(start, 1) for start, _ in calls] + [(end, -1) for _, end in calls])
    return max(accumulate((change for _, change in ends), initial=0))


def _doubts(made: Plan, model: Model, most_calls: int) -> Iterator[str]:
    if made.retried:
        yield f"{made.retried} rollouts were tried again; only their last attempt is replayed"
    if abs(made.error) > TOLERANCE:
        yield f"the replay is off by {made.error:+.0%}: something that is not recorded took time, so savings are a rough guide"
    sampler = model.parts.sampler
    if sampler.off > LOOSE:
        yield f"sampler calls are off by {sampler.off:.0%} from what tokens and crowd explain: savings there are rough"
    if not sampler.varied:
        yield "the number of sampler calls under way hardly varied, so what more runs at once would bring is a guess"
    elif any(each.change.startswith(("dispatch", "staleness")) for each in made.what_if):
        yield f"never more than {most_calls} sampler calls went at once: what changes save that let more go is a guess"


# --- where the time went -------------------------------------------------------------------------------------------


def _critical_path(recording: Recording) -> dict[str, float]:
    """In each step, what the rollout that was last did from the step's beginning, then gradients and update."""
    total: dict[str, float] = defaultdict(float)
    for step in recording.steps:
        for what, (start, end) in _last_chain(step):
            total[what] += max(0.0, min(end, step.end) - max(start, step.begin))
    whole = sum(total.values())
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {what: seconds / whole for what, seconds in ordered if seconds > 0}


def _last_chain(step: Step) -> Iterator[tuple[str, Interval]]:
    last = max(step.rollouts, key=lambda rollout: rollout.end)
    yield "waiting to start", (step.begin, last.first)
    yield from last.pieces()
    yield "gradients", (last.end, step.collected)
    yield "update", (step.collected, step.end)


def _busy(recording: Recording) -> list[Busy]:
    rollouts, steps = recording.rollouts, recording.steps
    uses: dict[str, list[Interval]] = {
        "init": [rollout.init for rollout in rollouts],
        "run": [rollout.run for rollout in rollouts if rollout.run is not None],
        "sampling": [call.time for rollout in rollouts for call in rollout.calls],
        "tools": [tool for rollout in rollouts for tool in rollout.tools],
        "reward": [rollout.reward for rollout in rollouts if rollout.reward is not None],
        "training": [time for step in steps for time in (*step.training, (step.collected, step.end))],
    }
    if isinstance(recording.config.dispatch, BoundedDispatch):
        uses = {"slots": [(rollout.first, rollout.end) for rollout in rollouts], **uses}
    line = Timeline(uses | {"steps": [(step.begin, step.end) for step in steps]})
    inside = np.minimum(line["steps"], 1.0)
    whole = line.total(inside)
    limits = _limits(recording.config.dispatch)
    return [
        Busy(use, line.total(inside * (line[use] > 0)) / whole, line.total(inside * line[use]) / whole, limits.get(use))
        for use in uses
    ]


# --- what would save time ------------------------------------------------------------------------------------------


def _what_if(model: Model, recording: Recording, before: float) -> list[WhatIf]:
    found = []
    for change, section, staleness, times in _changes(recording):
        seconds = replay(model, section, staleness, times)
        found.append(WhatIf(change, seconds, 1 - seconds / before))
    return sorted((each for each in found if each.saving >= LEAST_SAVING), key=lambda each: -each.saving)


def _changes(recording: Recording) -> Iterator[tuple[str, AnyDispatch, int, Times]]:
    """One at a time: what it is called, and how to replay it."""
    section, staleness = recording.config.dispatch, recording.training.staleness
    for name, times in (
        ("free init", Times(init=0.0)),
        ("free reward", Times(reward=0.0)),
        ("free tools", Times(tools=0.0)),
        ("sampler twice as fast", Times(sampling=0.5)),
        ("training twice as fast", Times(training=0.5)),
    ):
        yield name, section, staleness, times
    for stage, limit in _limits(section).items():
        wider = {stage: 2 * limit}
        if stage == "run" and isinstance(section, StreamDispatch) and section.runtimes is not None:
            wider["runtimes"] = section.runtimes + limit  # else they would be the limit now
        name = ", ".join(f"{key} {getattr(section, key)} → {value}" for key, value in wider.items())
        yield f"dispatch: {name}", section.model_copy(update=wider), staleness, Times()
    if staleness == 0 and recording.training.oversample == 1:  # the two do not go together
        yield "staleness 1", section, 1, Times()
    others: list[AnyDispatch] = [
        BoundedDispatch(kind="bounded"),
        PipelineDispatch(kind="pipeline"),
        StreamDispatch(kind="stream"),
    ]
    for other in others:
        if other.kind != section.kind:
            yield f"dispatch: {_describe(other)}", other, staleness, Times()


# --- for the console -----------------------------------------------------------------------------------------------


def render(made: Plan, console: Console) -> None:
    console.print(f"{made.run}: {made.steps} steps, {made.rollouts} rollouts, {made.dispatch}, staleness {made.staleness}")
    console.print(f"replay {made.replayed:.1f} s, recorded {made.recorded:.1f} s, {made.error:+.0%}")
    path = ", ".join(f"{share:.0%} {what}" for what, share in made.critical_path.items() if share >= 0.005)
    console.print(f"critical path: {path}")
    busy = Table("resource", *(Column(title, justify="right") for title in ("busy", "at once", "limit")))
    for use in made.busy:
        busy.add_row(use.resource, f"{use.share:.0%}", f"{use.mean:.1f}", "" if use.limit is None else str(use.limit))
    console.print(busy)
    if made.what_if:
        table = Table("change", Column("seconds", justify="right"), Column("saving", justify="right"))
        for each in made.what_if:
            table.add_row(each.change, f"{each.seconds:.1f}", f"−{each.saving:.0%}")
        console.print(table)
    else:
        console.print(f"no single change would save {LEAST_SAVING:.0%}")
    for note in made.notes:
        console.print(f"note: {note}")
    if made.picture is not None:
        console.print(f"picture: {made.picture}")
