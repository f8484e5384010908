"""The race of `palestra bench dispatch`, on a workload that is small enough for a test, and its account of overhead."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from palestra.bench import overhead
from palestra.bench.dispatch import bench_dispatch
from palestra.errors import UsageError
from palestra.lab.workload import FOLDER

KEYS = [
    "schedule",
    "staleness",
    "seed",
    "samples_per_hour",
    "vs_bounded_96",
    "vs_pipeline_96",
    "vs_pipeline_288",
    "vs_pipeline_best",
    "of_limit",
    "gpu_use",
    "reprefill_share",
    "peak_runtimes",
    "groups_dropped",
    "unit_time",
]

ONE_BY_ONE = """
async def dispatch(cfg, trajectories, init_fn, run_fn, eval_fn):
    for samples in trajectories.values():
        for trajectory in samples.values():
            for name in (init_fn, run_fn, eval_fn):
                await getattr(trajectory, name)()
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    text = (FOLDER / "w1.toml").read_text()
    for name, value in (("tasks", 3), ("samples", 2), ("steps", 2)):
        text, found = re.subn(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1
    path = tmp_path / "small.toml"
    path.write_text(text)
    return str(path)


def test_every_schedule_has_a_row_for_each_seed_and_the_table_fits_80_columns(small: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ONE_BY_ONE)
    mine = f"{tmp_path}/mine.py:dispatch"
    printed = io.StringIO()
    rows = bench_dispatch(Console(file=printed, width=80), small, [0, 1], mine)
    assert all(list(row) == KEYS for row in rows)
    published = ["bounded_96", "batch", "pipeline_96", "pipeline_288", "pipeline_best"]
    assert [(row["schedule"], row["seed"]) for row in rows] == [
        (name, seed) for name in [*published, "stream", "stream_stale", mine] for seed in (0, 1)
    ]
    assert {row["schedule"]: row["staleness"] for row in rows}["stream_stale"] == 1
    by_name = {row["schedule"]: row for row in rows if row["seed"] == 0}
    assert by_name[mine]["samples_per_hour"] < by_name["stream"]["samples_per_hour"]
    assert by_name["stream"]["vs_pipeline_96"] == pytest.approx(
        by_name["stream"]["samples_per_hour"] / by_name["pipeline_96"]["samples_per_hour"]
    )
    assert all(sum(row["unit_time"].values()) == pytest.approx(1, abs=1e-4) for row in rows)
    assert by_name["pipeline_96"]["of_limit"] == pytest.approx(  # it publishes on all units, as the limit has it
        sum(by_name["pipeline_96"]["unit_time"][part] for part in ("generation", "training", "publishing"))
    )
    assert "…" not in printed.getvalue()
    assert "pipeline_best" in printed.getvalue()


@pytest.mark.parametrize("where", ["mine.py", "nowhere.py:dispatch", "mine:dispatch"])
def test_a_dispatcher_that_is_not_there_is_named_before_anything_runs(small: str, where: str) -> None:
    with pytest.raises(UsageError, match=f"--dispatcher {where}: write FILE:function"):
        bench_dispatch(Console(file=io.StringIO()), small, [0], where)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return", "6 of 6 trajectories that did not go through init, run and reward once each, such as one with none of them"),
        ("[await s.initialize() for t in trajectories.values() for s in t.values()]", "such as one with init"),
        ("cfg['nothing']", "KeyError: 'nothing' (dispatch, line 3)"),
        ("await asyncio.Event().wait()", "nothing left to wait for"),
        ("raise SystemExit(0)", "SystemExit: 0 (dispatch, line 3)"),
        ("raise asyncio.CancelledError", "CancelledError"),
    ],
)
def test_a_dispatcher_that_fails_or_leaves_something_out_is_named(small: str, tmp_path: Path, body: str, complaint: str) -> None:
    head = "import asyncio\nasync def dispatch(cfg, trajectories, init_fn, run_fn, eval_fn):\n"
    (tmp_path / "mine.py").write_text(f"{head}    {body}\n")
    with pytest.raises(UsageError) as raised:
        bench_dispatch(Console(file=io.StringIO()), small, [0], f"{tmp_path}/mine.py:dispatch")
    assert str(raised.value).startswith(f"--dispatcher {tmp_path}/mine.py:dispatch: ")
    assert complaint in str(raised.value)


def test_overhead_is_told_as_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROLLOUTS", 500)
    printed = io.StringIO()
    figures = overhead.bench_overhead(Console(file=printed, width=120))
    assert figures["time_ratio"] == figures["stream"]["cpu_seconds"] / figures["bare"]["cpu_seconds"] > 0
    assert figures["memory_ratio"] == figures["stream"]["peak_bytes"] / figures["bare"]["peak_bytes"] > 0
    assert f"time {figures['time_ratio']:.2f}×" in printed.getvalue()
