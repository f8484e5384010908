"""Checking a task set before it is used: the gold solution must score 1, and doing nothing must score 0."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra import agent
from palestra.collect import prepare
from palestra.errors import ConfigError, Unprepared, cause, nearest
from palestra.protocols import Policy
from palestra.rollout import Patience, Rollout, describe
from palestra.statistics import SUCCESS
from palestra.task import AnyTask
from palestra.trajectory import Key, Trajectory

CONCURRENT = 8


@dataclass(frozen=True)
class Verdict:
    task_id: str
    gold: float | None
    noop: float | None
    problems: tuple[str, ...]
    seconds: float = 0.0
    """What both took together, each from its setup to its score."""


def choose(tasks: Sequence[AnyTask], only: Sequence[str], sample: int | None, seed: int) -> list[AnyTask]:
    """The tasks to check: those named, or a sample that the seed decides, or all."""
    if sample is not None and sample < 1:
        raise ConfigError(f"--sample {sample}: give the number of tasks to check, 1 or more")
    by_id = {task.id: task for task in tasks}
    for name in only:
        if name not in by_id:
            raise ConfigError(f"--only: no task {name!r}{nearest(name, list(by_id)[:1000])}")
    chosen = [by_id[name] for name in only] or list(tasks)
    if sample is not None and sample < len(chosen):
        chosen = random.Random(seed).sample(chosen, sample)
    return chosen


async def check(tasks: Sequence[AnyTask], cache: Path, on_verdict: Callable[[Verdict], None]) -> dict[str, Any]:
    """Check every task: how many `tasks`, in how many of them `gold` scored 1 and `noop` scored 0, the `failures`, and
    the `seconds` that a task took."""
    limit = asyncio.Semaphore(CONCURRENT)
    verdicts: list[Verdict] = []

    async def one(task: AnyTask) -> None:
        async with limit:
            verdict = await _check(task, cache)
        verdicts.append(verdict)
        on_verdict(verdict)

    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(one(task))
    except BaseExceptionGroup as errors:
        raise cause(errors) from None
    took = [verdict.seconds for verdict in verdicts]
    return {
        "tasks": len(verdicts),
        "gold": sum(v.gold is not None and v.gold >= SUCCESS for v in verdicts),
        "noop": sum(v.noop == 0 for v in verdicts),
        "failures": {v.task_id: list(v.problems) for v in verdicts if v.problems},
        "seconds": {"median": statistics.median(took), "most": max(took)},
    }


async def _check(task: AnyTask, cache: Path) -> Verdict:
    try:
        await prepare(task, cache)
    except Unprepared as error:
        return Verdict(task.id, None, None, (f"prepare: {error}",))
    started = time.monotonic()
    gold, noop = await _attempt(task, "gold"), await _attempt(task, "noop")
    problems = [f"{what}: {describe(each.failure)}" for what, each in (("gold", gold), ("noop", noop)) if each.failure]
    if gold.reward is not None and gold.reward < SUCCESS:
        problems.append(f"the gold solution scores {gold.reward:g}, not 1{_metrics(gold)}")
    if noop.reward is not None and noop.reward != 0:
        problems.append(f"doing nothing scores {noop.reward:g}, not 0{_metrics(noop)}")
    return Verdict(task.id, gold.reward, noop.reward, tuple(problems), time.monotonic() - started)


async def _attempt(task: AnyTask, what: Literal["gold", "noop"]) -> Trajectory:
    rollout = Rollout(task, Key("eval", 0, task.id, 0), _no_policy, agent.Limits(0, 1.0), 0, patience=Patience(retries=0))
    try:
        await rollout.advance()
        if rollout.next == "run":
            await rollout.instead_of_run(what)
        if rollout.next == "reward":
            await rollout.advance()
    finally:
        await rollout.close()
    return rollout.trajectory


def _metrics(trajectory: Trajectory) -> str:
    told = ", ".join(f"{name} {value:g}" for name, value in trajectory.metrics.items())
    return f" ({told})" if told else ""


def _no_policy(seed: int) -> AbstractAsyncContextManager[Policy]:
    raise AssertionError("a check runs no policy")
