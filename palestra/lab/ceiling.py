"""How fast any schedule could be on a workload's engine: generation that is never short of rollouts, then training.

The physical limit counts decoding at full KV, and every prefilled token once. An engine that prefills in whole chunks and
reserves KV for a whole reply needs more, which can be counted; one that keeps contexts that wait for a tool needs more still,
which is measured by feeding it without end.
"""

import math
from dataclasses import dataclass
from statistics import fmean

from palestra.dispatch.stream import Stream
from palestra.lab.cluster import Cluster
from palestra.lab.own import Setup, simulate_own
from palestra.lab.workload import Engine, Job, Workload

PLENTY = 100_000


@dataclass(frozen=True)
class _AlwaysGenerate:
    def start(self, units: int) -> int:
        return units

    def generating(self, cluster: Cluster) -> int:
        return cluster.spec.units


def bound(workload: Workload, seed: int) -> float:
    """The share of the physical limit that no schedule can exceed: a unit's steps have KV for so many calls, each call needs its
    chunks and its tokens, and holds its context and its whole reply meanwhile. Tools, tails and switches are for free."""
    steps = [workload.draw(seed, step) for step in range(workload.batch.steps)]
    limits = [workload.limits(jobs) for jobs in steps]
    rest = sum(limit.step - limit.gpu for limit in limits)
    generation = sum(_least_seconds(workload.engine, job) for jobs in steps for group in jobs for job in group)
    return sum(limit.step for limit in limits) / (generation + rest)


def _least_seconds(engine: Engine, job: Job) -> float:
    """Of all units."""
    unit_seconds, length = 0.0, 0
    for turn in job.turns:
        length += turn.new_tokens + turn.output_tokens
        chunks = math.ceil(turn.new_tokens / engine.prefill_chunk)
        unit_seconds += engine.step_seconds * (chunks + turn.output_tokens) * length / engine.kv_tokens
        unit_seconds += engine.decode_seconds * turn.output_tokens + chunks * engine.prefill_chunk / engine.prefill_rate
    return unit_seconds / engine.units


def generation_seconds(workload: Workload, run: int, seed: int, steps: int) -> float:
    """Seconds of generation for one step's rollouts on all units, with so many runs at once. The beginning and the end, where
    fewer run, are left out: it is what the second half of twice as many steps adds."""
    free = workload.model_copy(
        update={
            "init": workload.init.model_copy(update={"mean": 0.001, "capacity": PLENTY}),
            "reward": workload.reward.model_copy(update={"mean": 0.001, "capacity": PLENTY}),
            "training": workload.training.model_copy(update={"seconds": 0.0, "publish_seconds": 0.0}),
        }
    )
    rollouts = workload.batch.tasks * workload.batch.samples
    setup = Setup(lambda: Stream(PLENTY, run, PLENTY, 4 * rollouts), _AlwaysGenerate, staleness=3)
    once, twice = (simulate_own(free, setup, seed, count).seconds for count in (steps, 2 * steps))
    return (twice - once) / steps


def ceiling(workload: Workload, seed: int, steps: int = 5) -> float:
    """The best share of the physical limit that this engine allows, over how many runs it is given at once."""
    rollouts = workload.batch.tasks * workload.batch.samples
    fastest = min(generation_seconds(workload, run, seed, steps) for run in (rollouts * 5 // 8, rollouts * 3 // 4, rollouts))
    limit = fmean(workload.limits(workload.draw(seed, step)).step for step in range(steps, 2 * steps))
    return limit / (fastest + workload.training.seconds + workload.training.publish_seconds)
