"""The race of `palestra bench dispatch`, on a workload that is small enough for a test, and its account of overhead."""

import io
import json
import re
import signal
import subprocess
import sys
import time
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

ALL_AT_ONCE = """
import asyncio

async def dispatch(cfg, trajectories, init_fn, run_fn, eval_fn):
    async def through(trajectory):
        for name in (init_fn, run_fn, eval_fn):
            await getattr(trajectory, name)()

    await asyncio.gather(*(through(each) for samples in trajectories.values() for each in samples.values()))
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
    race = bench_dispatch(Console(file=printed, width=80), small, [0, 1], mine)
    rows = race.rows
    assert race.fault is None
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
        ("await asyncio.Event().wait()", "it had not returned from step 0 after"),
        ("raise SystemExit(0)", "SystemExit: 0 (dispatch, line 3)"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("trajectories.clear()", "6 of 6 trajectories that did not go through init, run and reward"),
        ("while True: await asyncio.sleep(100)", "it had not returned from step 0 after"),
        ("await asyncio.sleep(float('inf'))", "it had not returned from step 0 after"),
        ("while True: await asyncio.sleep(0)", "goes on without ever waiting"),
    ],
)
def test_a_dispatcher_that_fails_or_leaves_something_out_is_named(small: str, tmp_path: Path, body: str, complaint: str) -> None:
    head = "import asyncio\nasync def dispatch(cfg, trajectories, init_fn, run_fn, eval_fn):\n"
    (tmp_path / "mine.py").write_text(f"{head}    {body}\n")
    with pytest.raises(UsageError) as raised:
        bench_dispatch(Console(file=io.StringIO()), small, [0], f"{tmp_path}/mine.py:dispatch")
    assert str(raised.value).startswith(f"--dispatcher {tmp_path}/mine.py:dispatch: ")
    assert complaint in str(raised.value)


def test_schedules_whose_kv_is_lost_at_every_turn_are_in_time(tmp_path: Path) -> None:
    """KV holds one context, and turns are made of observations that are read slowly."""
    text = 'base = "w1"\n'
    for section, values in {
        "batch": "tasks = 2\nsamples = 2\nsteps = 1",
        "turns": "median = 50\ntask_sigma = 0\nsample_sigma = 0\nleast = 50",
        "output": "median = 20\nsigma = 0\nmost = 20",
        "observation": "median = 500\nsigma = 0\nleast = 500\nmost = 500",
        "init": "mean = 1",
        "reward": "mean = 1",
        "engine": "units = 1\nprefill_rate = 1000\nkv_tokens = 33000",
    }.items():
        text += f"[{section}]\n{values}\n"
    (tmp_path / "thrash.toml").write_text(text)
    (tmp_path / "mine.py").write_text(ALL_AT_ONCE)
    mine = f"{tmp_path}/mine.py:dispatch"
    race = bench_dispatch(Console(file=io.StringIO()), str(tmp_path / "thrash.toml"), [0], mine)
    assert race.fault is None
    assert {row["schedule"] for row in race.rows} >= {"batch", mine}


def test_one_that_fails_in_a_later_step_costs_the_others_nothing(small: str, tmp_path: Path) -> None:
    later = ONE_BY_ONE.replace(
        "    for samples", "    global steps\n    steps += 1\n    assert steps < 3, 'no more'\n    for samples"
    )
    (tmp_path / "mine.py").write_text("steps = 0" + later)
    where, rows = f"{tmp_path}/mine.py:dispatch", tmp_path / "rows.json"
    words = ["bench", "dispatch", "--workload", small, "--seeds", "0", "--dispatcher", where, "--json", str(rows)]
    ended = subprocess.run([sys.executable, "-m", "palestra", *words], check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == f"palestra: --dispatcher {where}: AssertionError: no more (dispatch, line 5)\n"
    assert [row["schedule"] for row in json.loads(rows.read_text())][-1] == "stream_stale"


@pytest.mark.parametrize(
    ("name", "text", "function", "complaint"),
    [
        ("mine.py", "def dispatch(", "dispatch", "SyntaxError: '(' was never closed"),
        ("mine.py", "import nothing_of_this_name", "dispatch", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("mine.py", "1 / 0", "dispatch", "ZeroDivisionError: division by zero (<module>, line 1)"),
        ("mine.py", "", "", "write FILE:function"),
        ("my.own.py", "", "dispatch", "a module's name has no dot"),
    ],
)
def test_a_file_that_is_no_module_is_named(
    small: str, tmp_path: Path, name: str, text: str, function: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        bench_dispatch(Console(file=io.StringIO()), small, [0], f"{tmp_path / name}:{function}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_race_that_is_stopped_leaves_no_process(how: signal.Signals) -> None:
    race = subprocess.Popen(
        [sys.executable, "-m", "palestra", "bench", "dispatch"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    children: list[str] = []
    while len(children) < 2:
        time.sleep(0.1)
        children = Path(f"/proc/{race.pid}/task/{race.pid}/children").read_text().split()
    race.send_signal(how)
    _, said = race.communicate(timeout=30)
    assert race.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9, signal.SIGINT: 130}[how]
    assert said == b""
    until = time.monotonic() + 10
    while any(map(alive, children)):
        assert time.monotonic() < until, "its processes have outlived it"
        time.sleep(0.1)


def alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_overhead_is_told_as_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROLLOUTS", 500)
    printed = io.StringIO()
    figures = overhead.bench_overhead(Console(file=printed, width=120))
    assert figures["time_ratio"] == figures["stream"]["cpu_seconds"] / figures["bare"]["cpu_seconds"] > 0
    assert figures["memory_ratio"] == figures["stream"]["peak_bytes"] / figures["bare"]["peak_bytes"] > 0
    assert f"time {figures['time_ratio']:.2f}×" in printed.getvalue()
