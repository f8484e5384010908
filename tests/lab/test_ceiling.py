"""What no schedule can exceed: counted from the jobs, and above whatever was played."""

import pytest

from palestra.bench.dispatch import own_setup
from palestra.lab import workload
from palestra.lab.ceiling import bound, ceiling
from palestra.lab.own import simulate_own
from palestra.lab.workload import Workload


def test_the_bound_is_above_what_is_played_and_below_the_limit(small: Workload) -> None:
    played = simulate_own(small, own_setup(small, 1), 0)
    assert played.of_limit < bound(small, 0) < 1
    assert ceiling(small, 0) < bound(small, 0)


def test_one_call_of_one_job_by_hand(small: Workload) -> None:
    values = small.model_dump()
    values["batch"] = {"tasks": 1, "samples": 1, "steps": 1}
    values["turns"] |= {"median": 1, "task_sigma": 0, "sample_sigma": 0, "least": 1, "most": 1}
    values["output"] = {"median": 100, "sigma": 0, "least": 100, "most": 100}
    values["context"] = {"start": 1000, "end": 20_000}
    values["engine"] |= {"units": 1, "kv_tokens": 22_000, "prefill_chunk": 512, "prefill_rate": 10_000}
    values["engine"] |= {"step_seconds": 0.02, "decode_seconds": 0.001}
    values["training"] = {"seconds": 1.0, "publish_seconds": 1.0}
    one = workload.parse(values)
    generation = 0.02 * 102 * 1100 / 22_000 + 100 * 0.001 + 2 * 512 / 10_000
    assert bound(one, 0) == pytest.approx(one.limits(one.draw(0, 0)).step / (2 + generation))
