"""Our own dispatch in the lab: the same every time, never staler than allowed, and ahead of the published schedules."""

from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.bench.dispatch import own_setup
from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.lab.cluster import Elastic
from palestra.lab.own import Setup, simulate_own
from palestra.lab.picture import draw_schedules
from palestra.lab.published import pipeline
from palestra.lab.simulation import simulate_published
from palestra.lab.workload import load
from palestra.protocols import Dispatcher


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_seed_gives_the_same_figures_again(staleness: int) -> None:
    workload = load("sketch")
    first, second = (simulate_own(workload, own_setup(workload, staleness), 0) for _ in range(2))
    assert first == second
    assert first.groups_dropped == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_stream_is_ahead_of_the_published_pipeline_on_w1(staleness: int) -> None:
    workload = load("w1")
    ours = simulate_own(workload, own_setup(workload, staleness), 0, steps=3)
    theirs = simulate_published(workload, pipeline, {"max_parallel_agents": 288}, 0, steps=3)
    assert ours.samples_per_hour > 1.2 * theirs.samples_per_hour


@pytest.mark.parametrize(
    "dispatcher", [Batch, lambda: Bounded(5), lambda: Pipeline(3, 5, 4, 2), lambda: Stream(2, 5, 3, 8)], ids=str
)
def test_every_dispatcher_comes_to_the_end(dispatcher: Callable[[], Dispatcher]) -> None:
    workload = load("sketch")
    figures = simulate_own(workload, Setup(dispatcher, lambda: Elastic(slack=-1.0)), 1)
    assert figures.samples_per_hour > 0


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("keeps_kv", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_any_number_of_units_will_do(units: int, keeps_kv: bool, staleness: int) -> None:
    sketch = load("sketch")
    engine = sketch.engine.model_copy(update={"units": units, "switch_keeps_kv": keeps_kv})
    workload = sketch.model_copy(update={"engine": engine})
    assert 0 < simulate_own(workload, own_setup(workload, staleness), 0).of_limit <= 1.1


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("init", "mean", 1e6),
        ("init", "capacity", 0.01),
        ("reward", "mean", 1e6),
        ("engine", "step_seconds", 1e6),
        ("engine", "decode_seconds", 1e6),
        ("engine", "prefill_rate", 0.01),
        ("training", "seconds", 1e6),
        ("training", "publish_seconds", 1e6),
        ("tools", "slow_sigma", 10.0),
    ],
)
def test_times_that_are_lost_in_rounding_hold_up_nothing(section: str, key: str, value: float) -> None:
    sketch = load("sketch")
    parts = getattr(sketch, section).model_copy(update={key: value})
    workload = sketch.model_copy(update={section: parts})
    for staleness in (0, 1):
        assert simulate_own(workload, own_setup(workload, staleness), 0).of_limit > 0
    assert simulate_published(workload, pipeline, {"max_parallel_agents": 8}, 0).of_limit > 0


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pictures = draw_schedules(tmp_path)
    assert len(pictures) == 5
    assert all(picture.stat().st_size > 5_000 for picture in pictures)
