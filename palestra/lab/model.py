"""From a recording to a model of it: what every rollout asks for, whatever the schedule, and the machine that serves it.

Each stage and call keeps its own amount of work, so that in the crowd in which it was recorded it takes as long as it did.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.config import Torch
from palestra.lab.fitting import Array, StageFit, Timeline, fit_sampler, fit_stage
from palestra.lab.machine import Parts, Work
from palestra.lab.recording import Interval, Played, Recording, Step
from palestra.protocols import Capacity

REFINEMENTS = 3
"""How often the sampler is fitted again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One of those that a run is made of, in order."""

    what: Literal["sample", "tool", "rest"]
    work: Work


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout. It ends before a stage that is None."""

    init: Work
    run: tuple[Piece, ...] | None
    reward: Work | None


@dataclass(frozen=True, slots=True)
class JobGroup:
    jobs: tuple[Job, ...]
    training: float
    """Seconds that its gradients take."""
    gave: bool
    """Whether it has any."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What comes after a step's gradients."""

    update: float
    pause: float
    """Until the next step begins; not counted as training."""
    beside: int
    """Calls of an evaluation that the sampler has meanwhile."""


@dataclass(frozen=True)
class Model:
    groups: tuple[JobGroup, ...]
    """In the order in which they are begun; those too that were replaced, for they gave no gradients."""
    steps: tuple[Ending, ...]
    groups_per_step: int
    parts: Parts
    capacity: Capacity | None
    context: int


def model_of(recording: Recording) -> Model:
    backend = recording.config.backend
    embedded = isinstance(backend, Torch)
    fitted = _Fitted(recording, embedded)
    jobs = iter(fitted.jobs())
    groups = []
    for step in recording.steps:
        training = fitted.training_work(step.training) / max(1, len(step.training))
        for group in step.groups:
            mine = tuple(next(jobs) for _ in group.rollouts)
            groups.append((group.place, JobGroup(mine, training if group.gave else 0.0, group.gave)))
    return Model(
        groups=tuple(group for _, group in sorted(groups, key=lambda placed: placed[0])),
        steps=tuple(map(fitted.ending, recording.steps)),
        groups_per_step=recording.training.groups,
        parts=fitted.parts,
        capacity=Capacity(backend.kv_tokens) if isinstance(backend, Torch) else None,
        context=recording.config.agent.context,
    )


class _Fitted:
    def __init__(self, recording: Recording, shared: bool) -> None:
        self._rollouts = recording.rollouts
        self._calls = [call for rollout in self._rollouts for call in rollout.calls]
        mine: dict[str, list[Interval]] = {
            "init": [rollout.init for rollout in self._rollouts],
            "reward": [rollout.reward for rollout in self._rollouts if rollout.reward is not None],
            "sample": [call.time for call in self._calls],
        }
        others = {kind: [time for what, time in recording.others if what == kind] for kind in mine}
        everyone = {kind: mine[kind] + others[kind] for kind in mine}
        training = [time for step in recording.steps for time in (*step.training, (step.collected, step.end))]
        self._line = line = Timeline(everyone | {"training": training, "other calls": others["sample"]})
        # Where sampler and trainer share processors, half of one's time beside the other was lost to it.
        self._sampling = np.where(shared & (line["training"] > 0), 0.5, 1.0)
        self._training = np.where(shared & (line["sample"] > 0), 0.5, 1.0)
        self._spans = {kind: _spans(times) for kind, times in mine.items()}
        self._output = np.array([call.output for call in self._calls], float)
        self._new = np.array([call.new for call in self._calls], float)
        seconds = line.integral(self._sampling, self._spans["sample"])
        self._beside = line.mean(line["sample"], self._spans["sample"])
        sampler = fit_sampler(seconds, self._output, self._new, self._beside)
        for _ in range(REFINEMENTS):  # what counts is how many were there token by token, and in a crowd tokens take longer
            self._beside = line.mean(line["sample"], self._spans["sample"], self._sampling * sampler.speed(line["sample"]))
            sampler = fit_sampler(seconds, self._output, self._new, self._beside)
        self.parts = Parts(self._fit_stage("init"), self._fit_stage("reward"), sampler, shared)

    def jobs(self) -> Iterator[Job]:
        """Of all rollouts, in the order of the recording."""
        inits, rewards = iter(self._staged("init", self.parts.init)), iter(self._staged("reward", self.parts.reward))
        calls = iter(self._called())
        for rollout in self._rollouts:
            pieces = None if rollout.run is None else tuple(_pieces(rollout, [next(calls) for _ in rollout.calls]))
            yield Job(next(inits), pieces, None if rollout.reward is None else next(rewards))

    def training_work(self, times: Sequence[Interval]) -> float:
        """Seconds that training took or, beside the sampler, would have taken without it."""
        return float(self._line.integral(self._training, _spans(times)).sum())

    def ending(self, step: Step) -> Ending:
        pause = _spans([(step.end, step.end + step.pause)])
        [calls] = self._line.integral(self._line["other calls"], pause) / max(step.pause, 1e-9)
        return Ending(self.training_work([(step.collected, step.end)]), step.pause, round(float(calls)))

    def _fit_stage(self, stage: str) -> StageFit:
        spans, line = self._spans[stage], self._line
        own, both = line.mean(line[stage], spans), line.mean(line["init"] + line["reward"], spans)
        return fit_stage(spans[:, 1] - spans[:, 0], own, both, os.cpu_count() or 1)

    def _staged(self, stage: str, fit: StageFit) -> list[Work]:
        spans, line = self._spans[stage], self._line
        crowd = line["init"] + line["reward"] if fit.both else line[stage]
        waits = fit.waiting_share(line.mean(crowd, spans)) * (spans[:, 1] - spans[:, 0])
        works = line.integral(fit.speed(crowd), _later(spans, waits))
        return list(map(Work, waits.tolist(), works.tolist()))

    def _called(self) -> list[Work]:
        spans, line, sampler = self._spans["sample"], self._line, self.parts.sampler
        prefills = sampler.prefill_share(self._output, self._new, self._beside) * (spans[:, 1] - spans[:, 0])
        waits = line.integral(self._sampling, np.stack([spans[:, 0], spans[:, 0] + prefills], axis=1))
        works = line.integral(self._sampling * sampler.speed(line["sample"]), _later(spans, prefills))
        return list(map(Work, waits.tolist(), works.tolist()))


def _pieces(rollout: Played, calls: Sequence[Work]) -> Iterator[Piece]:
    """The run without a gap."""
    work = iter(calls)
    for what, (start, end) in rollout.run_pieces():
        if what == "sampling":
            yield Piece("sample", next(work))
        elif end > start:
            yield Piece("tool" if what == "tools" else "rest", Work(end - start, 0.0))


def _spans(times: Sequence[Interval]) -> Array:
    return np.asarray(times, float).reshape(-1, 2)


def _later(spans: Array, seconds: Array) -> Array:
    """What is left of each span after so many seconds."""
    return np.stack([np.minimum(spans[:, 0] + seconds, spans[:, 1]), spans[:, 1]], axis=1)
