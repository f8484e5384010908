"""A small workload: W1's times, with a batch of 24 and KV for a handful of contexts, so that room is scarce."""

import pytest

from palestra.lab import workload
from palestra.lab.workload import Workload


@pytest.fixture(scope="session")
def w1() -> Workload:
    return workload.load("w1")


@pytest.fixture(scope="session")
def small(w1: Workload) -> Workload:
    values = w1.model_dump()
    values["batch"] = {"tasks": 6, "samples": 4, "steps": 2}
    values["turns"] |= {"median": 8, "most": 12}
    values["engine"] |= {"kv_tokens": 33_000, "units": 4}
    values["init"] |= {"capacity": 4}
    values["reward"] |= {"capacity": 8}
    return workload.parse(values)
