"""The rehearsal of `recipes/swe/train32b.toml` without a GPU: what is overridden, and what must come of its one step."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from palestra.ledger import Ledger
from palestra.trajectory import Trajectory

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes" / "swe"

SIZES = (
    "tasks.arguments={search = true, lines = 2, first = 2}",
    "agent.turns=6",
    "agent.context=8192",
    "sampling.max_tokens=256",
    "backend.gpus=1",
    "backend.nodes=1",
    "backend.sequence_parallel=1",
    "backend.tensor_parallel=1",
    "backend.verl.workers=1",
    "training.steps=1",
    "training.groups=2",
    "evaluation.tasks=2",
    "evaluation.samples=1",
)
"""All that is overridden beside the model, the kind of the backend and the run's folder. docs/swe.md lists the same."""

LEARNING_RATE = 1e-6

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed: agents have no sandboxes")


def make_model(folder: Path) -> Path:
    subprocess.run([sys.executable, str(RECIPES / "rehearsal_model.py"), str(folder)], cwd=ROOT, check=True, timeout=1500)
    return folder


def rehearse(kind: str, model: Path, folder: Path) -> dict[str, Any]:
    """The one step, through the command line; the metrics of the step."""
    overrides = [f"backend.kind={kind}", f"backend.model={model}", f"run.folder={folder}", *SIZES]
    command = [sys.executable, "-m", "palestra", "train", str(RECIPES / "train32b.toml"), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [step] = [row for row in rows if "groups_trained" in row]
    assert step["groups_trained"] >= 1, "no group had both a bug that was mended and one that was not: there is no gradient"
    assert all(math.isfinite(value) for value in step.values())
    return step


def check_the_ledger(folder: Path) -> None:
    """Real attempts, judged by hidden tests: some mended the bug, some did not."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify() == []
        assert ledger.committed_step() == 0
        attempts = [row.trajectory for row in ledger.trajectories(phase="train")]
    assert len(attempts) == 2 * 8
    assert {attempt.reward for attempt in attempts} == {0.0, 1.0}
    for attempt in attempts:
        assert attempt.failure is None
        assert attempt.metrics["fails"] == attempt.reward  # the share of the hidden tests that were to pass, and do
        if attempt.reward == 1:
            assert {"edit", "finish"} <= _called(attempt)


def _called(attempt: Trajectory) -> set[str]:
    return {call.name for turn in attempt.turns for call in turn.message.calls}


def largest_move(before: Path, after: Path) -> float:
    """How far the weight that was moved farthest is from where it was."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return max((new[name].float() - weight.float()).abs().max().item() for name, weight in old.items())
