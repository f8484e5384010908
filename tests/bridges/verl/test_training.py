"""verl's own trainer, workers, engine and checkpoints train our agent, for real, on the CPU: success rises, a control stays where
it was, a run whose server is killed says so and goes on, and segments and failures come through as they should."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import psutil
from parity.recorded import embedded_loss

from palestra.advantage import credit
from palestra.bridges.verl.driving import LATEST
from palestra.config import Loss
from palestra.ledger import Ledger
from palestra.trajectory import Group, Trajectory

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "bridges"
SECONDS = 600
"""For a run, on a slow machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl") / "model"
    subprocess.run([sys.executable, str(RECIPE / "make_model.py"), str(folder)], check=True)
    return folder


@contextmanager
def training(*words: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """In a process group of its own: Ray's processes are in it too, and none outlives the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "palestra", "train", *words],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train(*words: str, **variables: str) -> None:
    with training(*words, **variables) as process:
        ended(process)


def recipe(model: Path, folder: Path, *overrides: str) -> list[str]:
    return [str(RECIPE / "train.toml"), "backend.kind=verl", f"backend.model={model}", f"run.folder={folder}", *overrides]


def ended(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """What it said on standard error, or all it said when it ended otherwise than expected."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, f"{out}\n{err}"
    return err


def summary(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return read


def solved(folder: Path, when: str, how: str) -> tuple[int, int]:
    result = summary(folder)["evaluations"][when][how]
    count = result["tasks"] * result["samples"]
    return round(result["pass@1"]["value"] * count), count


def chance_of_equal(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The p-value of a two-sided test that both are draws from one share."""
    (a, n), (b, m) = before, after
    pooled = (a + b) / (n + m)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    return math.erfc(abs(a / n - b / m) / spread / math.sqrt(2)) if spread else 1.0


def servers(run: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The rollout servers among the processes that the run has started."""
    return [child for child in psutil.Process(run.pid).children(recursive=True) if "ray::Server" in " ".join(child.cmdline())]


def committed(folder: Path) -> int:
    ledger = folder / "ledger.sqlite"
    if not ledger.exists():
        return 0
    with Ledger.open(ledger, read_only=True) as read:
        return read.committed_step() + 1


def test_success_rises_across_the_death_of_a_server(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training(*recipe(model, folder, "training.steps=8", "dispatch.retries=1", "dispatch.backoff=0.1")) as run:
        deadline = time.monotonic() + SECONDS
        while run.poll() is None and committed(folder) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        [server] = servers(run)
        server.kill()
        said = ended(run, code=1)
    assert "rollout server does not answer" in said
    assert f"go on with `palestra train --resume {folder}`" in " ".join(said.split())
    before = committed(folder)
    assert 3 <= before < 8

    (folder / "checkpoints" / LATEST).write_text("")  # as one leaves it that is killed while it writes the name
    train("--resume", str(folder))
    assert committed(folder) == 8
    for how in ("sampled", "greedy"):
        base, final = solved(folder, "base", how), solved(folder, "final", how)
        assert min(base[1], final[1]) >= 200
        assert final[0] / final[1] > base[0] / base[1]
        assert chance_of_equal(base, final) < 0.01, f"{how}: {base} → {final}"
    check_the_ledger(folder)
    check_the_first_loss(folder)
    check_the_adapter(model, folder, tmp_path)


@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 143), ([signal.SIGINT] * 2, 130)], ids=["term", "int"])
def test_whoever_insists_leaves_no_process_behind(
    model: Path, tmp_path: Path, signals: Sequence[signal.Signals], code: int
) -> None:
    folder = tmp_path / "run"
    with training(*recipe(model, folder)) as run:
        deadline = time.monotonic() + SECONDS
        while run.poll() is None and not servers(run) and time.monotonic() < deadline:
            time.sleep(0.2)
        started = psutil.Process(run.pid).children(recursive=True)
        for each in signals:
            run.send_signal(each)
            time.sleep(0.1)
        assert "Traceback" not in ended(run, code)
        gone, left = psutil.wait_procs(started, timeout=30)
    assert gone
    assert left == []


def check_the_adapter(model: Path, folder: Path, tmp_path: Path) -> None:
    """The embedded backend, with what verl has learned, solves what verl's server solved."""
    plain = [
        str(RECIPE / "train.toml"),
        f"backend.model={model}",
        f"backend.adapter={folder / 'adapter'}",
        "sampling.temperature=0",
    ]
    command = [
        sys.executable,
        "-m",
        "palestra",
        "eval",
        *plain,
        f"run.folder={tmp_path / 'eval'}",
        "--json",
        str(tmp_path / "eval.json"),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    success = json.loads((tmp_path / "eval.json").read_text())["pass@1"]["value"]
    assert success == pytest.approx(summary(folder)["evaluations"]["final"]["greedy"]["pass@1"]["value"], abs=0.02)


def check_the_ledger(folder: Path) -> None:
    """Every attempt of every step once, with logprobs that are the model's, and nothing against the ledger's rules."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify() == []
        keys = [row.key for row in ledger.trajectories(phase="train") if row.state != "finished"]
        trained = list(ledger.trajectories(phase="train"))
    assert len(keys) == len(set(keys)) == 8 * 8 * 8
    assert {key.step for key in keys} == set(range(8))
    assert all(version == row.key.step for row in trained for version in versions(row.trajectory))


def check_the_first_loss(folder: Path) -> None:
    """verl's engine, on the real model, found the loss that the embedded backend finds in the same trajectories."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        attempts = [row.trajectory for row in ledger.trajectories(phase="train", step=0)]
    groups = [Group(name, tuple(t for t in attempts if t.task_id == name)) for name in {t.task_id for t in attempts}]
    samples = [sample for group in groups for sample in credit(group, "grpo").samples]
    logprobs = [[value for value, sampled in zip(s.logprobs, s.mask, strict=True) if sampled] for s in samples]
    value, _ = embedded_loss(samples, logprobs, Loss(kind="importance_sampling"))
    share = sum(map(len, logprobs)) / sum(t.sampled_tokens for t in attempts)  # verl divides by all tokens of the step
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [first] = [row["verl/pg_loss"] for row in rows if row["step"] == 0 and "verl/pg_loss" in row]
    assert first == pytest.approx(value * share, rel=1e-3)


def versions(trajectory: Trajectory) -> set[int]:
    return {version for segment in trajectory.segments for version in segment.versions if version >= 0}


def test_with_advantages_of_zero_nothing_is_learned(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tests = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    control = 'backend.overrides={"algorithm.adv_estimator" = "zero"}'
    words = recipe(model, folder, "training.steps=3", control)
    train(*words, PYTHONPATH=tests, VERL_USE_EXTERNAL_MODULES="bridges.verl.zero_advantages")
    assert solved(folder, "base", "greedy") == solved(folder, "final", "greedy")  # the very same weights
    assert chance_of_equal(solved(folder, "base", "sampled"), solved(folder, "final", "sampled")) > 0.01


def test_segments_and_failures_come_through(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tasks = ["tasks.train=rewriting:tasks", "tasks.heldout=rewriting:others", f"tasks.folder={Path(__file__).parent}"]
    train(*recipe(model, folder, "training.steps=1", "agent.turns=2", "dispatch.retries=0", *tasks))
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        recorded = [row.trajectory for row in ledger.trajectories(phase="train")]
    assert any(trajectory.failure for trajectory in recorded)
    assert any(len(trajectory.segments) == 2 for trajectory in recorded)
    [row] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"groups_trained"' in line]
    assert row["failed"] == sum(trajectory.failure is not None for trajectory in recorded)
    assert math.isfinite(row["verl/pg_loss"])
