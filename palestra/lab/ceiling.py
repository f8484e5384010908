"""How fast any schedule could be on a workload's engine: generation that is never short of rollouts, then training.

The physical limit counts decoding at full KV, and every prefilled token once. An engine that prefills in whole chunks and keeps
contexts that wait for a tool needs more; how much is measured by feeding it without end.
"""

from dataclasses import dataclass

from palestra.dispatch.stream import Stream
from palestra.lab.cluster import Cluster
from palestra.lab.own import Setup, simulate_own
from palestra.lab.workload import Workload

PLENTY = 100_000


@dataclass(frozen=True)
class _AlwaysGenerate:
    def start(self, units: int) -> int:
        return units

    def generating(self, cluster: Cluster) -> int:
        return cluster.spec.units


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
    limit = workload.limits(workload.draw(seed, 0))
    rest = workload.training.seconds + workload.training.publish_seconds
    return limit.step / (fastest + rest)
