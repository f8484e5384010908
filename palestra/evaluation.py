"""Evaluation: attempts at held-out tasks, and what share of them succeeds, with intervals."""

import asyncio
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Any

from palestra.collect import Collector
from palestra.errors import PalestraError, cause
from palestra.protocols import Sampling
from palestra.rollout import describe
from palestra.statistics import Estimate, pass_at
from palestra.task import AnyTask
from palestra.trajectory import Phase, Trajectory


@dataclass(frozen=True)
class Result:
    """Failed rollouts are counted apart: they are not the model's, and never a reward of 0."""

    tasks: int
    samples: int
    pass_at: dict[int, Estimate]
    reward: float
    turns: float
    sampled_tokens: int
    stops: dict[str, int]
    failures: dict[str, int]
    seconds: float
    usage: dict[str, float]
    """What a server charged for, failed rollouts included; empty where nobody counts."""

    @property
    def success(self) -> Estimate:
        return self.pass_at[1]

    def to_json(self) -> dict[str, Any]:
        rates = {f"pass@{k}": {"value": e.value, "low": e.low, "high": e.high} for k, e in self.pass_at.items()}
        plain = {key: value for key, value in vars(self).items() if key != "pass_at"}
        return {**rates, **plain}


async def evaluate(
    collector: Collector,
    tasks: Sequence[AnyTask],
    samples: int,
    step: int,
    sampling: Sampling,
    phase: Phase = "eval",
    *,
    again: bool = False,
) -> Result:
    """Attempts that were recorded before count, those that failed too, unless they are to be tried again."""
    started = time.monotonic()
    async with collector.trajectories(tasks, samples, phase, step, sampling, again=again) as stream:
        trajectories = [trajectory async for trajectory in stream]
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if failures and len(failures) == len(trajectories):
        raise PalestraError(f"every rollout of the evaluation failed; the first: {describe(failures[0])}")
    return summarise(trajectories, samples, time.monotonic() - started)


async def evaluate_both(
    collector: Collector, tasks: Sequence[AnyTask], samples: int, step: int, sampling: Sampling, greedy: bool
) -> dict[str, Result]:
    """As configured and, if asked, once more at temperature 0. Side by side: what one leaves of the sampler towards its end, the
    other one uses."""
    kinds: dict[str, tuple[int, Sampling, Phase]] = {"sampled": (samples, sampling, "eval")}
    if greedy:
        kinds["greedy"] = (1, dataclasses.replace(sampling, temperature=0.0), "greedy")
    try:
        async with asyncio.TaskGroup() as both:
            running = {
                name: both.create_task(evaluate(collector, tasks, attempts, step, how, phase))
                for name, (attempts, how, phase) in kinds.items()
            }
    except BaseExceptionGroup as errors:
        raise cause(errors) from None
    return {name: task.result() for name, task in running.items()}


def summarise(trajectories: Sequence[Trajectory], samples: int, seconds: float) -> Result:
    rewards: dict[str, list[float]] = defaultdict(list)
    failures: Counter[str] = Counter()
    usage: dict[str, float] = defaultdict(float)
    done = []
    for trajectory in trajectories:
        for name, amount in trajectory.usage.items():
            usage[name] += amount
        if trajectory.failure is not None:
            failures[f"{trajectory.failure.stage}/{trajectory.failure.kind}"] += 1
        elif trajectory.reward is not None:
            rewards[trajectory.task_id].append(trajectory.reward)
            done.append(trajectory)
    fewest = min((len(attempts) for attempts in rewards.values()), default=0)
    chosen = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k <= fewest} | {max(1, fewest)})
    return Result(
        tasks=len(rewards),
        samples=samples,
        pass_at={k: pass_at(k, rewards) for k in chosen},
        reward=fmean(t.reward for t in done if t.reward is not None) if done else nan,
        turns=sum(len(t.turns) for t in done) / max(1, len(done)),
        sampled_tokens=sum(t.sampled_tokens for t in done),
        stops=dict(Counter(str(t.stop) for t in done)),
        failures=dict(failures),
        seconds=seconds,
        usage=dict(usage),
    )
