"""SkyRL's real training loops through our generator, on a CPU: success rises, a control stays flat, and a run that was stopped,
killed or let down by its engine goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges.skyrl.conftest import RECIPE, configured

from palestra.bridges.skyrl_train import entry, estimators
from palestra.bridges.skyrl_train.account import Account
from palestra.bridges.skyrl_train.cpu_engine import CpuEngine
from palestra.bridges.skyrl_train.trainers import AsyncTrainer, SyncTrainer, go_back_to_complete
from palestra.config import Config, dump
from palestra.errors import PalestraError
from palestra.ledger import Ledger
from palestra.report import Reporter
from palestra.runs import RunFolder

EPISODES = 240
GAP = "skyrl/policy/minibatch_rollout_logprobs_abs_diff_max"


def _train(config: Config, resume: bool = False, stopping: Any = lambda: False) -> dict[str, Any]:
    run = RunFolder(config.run.folder) if resume else RunFolder.create(config.run.folder, config)
    return entry.train(config, run, Reporter(config, run, quiet=True), stopping)


def _chance(before: int, after: int, n: int) -> float:
    """Fisher's exact test, one-sided: how likely so many successes come to lie behind, if nothing had changed."""
    total = before + after
    return sum(comb(n, k) * comb(n, total - k) for k in range(after, min(n, total) + 1)) / comb(2 * n, total)


def _successes(summary: dict[str, Any], when: str, how: str) -> int:
    result = summary["evaluations"][when][how]
    assert result["tasks"] == EPISODES
    assert result["failures"] == {}
    return round(result["pass@1"]["value"] * EPISODES)


@pytest.mark.parametrize("overrides", [("run.seed=0",), ("run.seed=1", "training.staleness=1")], ids=["sync", "fully-async"])
def test_success_rises(model: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = configured(model, tmp_path / "run", "training.steps=10", *overrides)
    summary = _train(config)
    for how in ("sampled", "greedy"):
        before, after = (_successes(summary, when, how) for when in ("base", "final"))
        assert _chance(before, after, EPISODES) < 0.01, f"{how}: {before} → {after} of {EPISODES}"
    with Ledger.open(config.run.folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify() == []
        assert ledger.committed_step() == 9
    assert config.training is not None
    if config.training.staleness == 0:
        assert "finished" not in summary["trajectories"]["train"]  # all that was sampled was trained on
        rows = RunFolder(config.run.folder).read_metrics()
        gaps = [row[GAP] for row in rows if GAP in row]
        assert len(gaps) == 10
        assert max(gaps) < 1e-3  # sampler and trainer have the same weights
    assert (Path(summary["adapter"]) / "adapter_model.safetensors").is_file()


def test_without_advantages_nothing_is_learned(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: all else the same, and the model and its success stay what they were."""
    monkeypatch.setattr(estimators, "advantages", lambda rewards, _: [0.0] * len(rewards))
    config = configured(model, tmp_path / "run", "training.steps=4")
    summary = _train(config)
    before, after = (_successes(summary, when, "sampled") for when in ("base", "final"))
    assert _chance(before, after, EPISODES) > 0.01
    assert _successes(summary, "base", "greedy") == _successes(summary, "final", "greedy")
    weights = [torch.load(folder / "policy" / "policy.pt", weights_only=True) for folder in _checkpoints(config)]
    assert len(weights) == 2
    assert all(torch.equal(weights[0]["weights"][name], value) for name, value in weights[1]["weights"].items())


def _checkpoints(config: Config) -> list[Path]:
    return sorted((config.run.folder / "checkpoints").glob("global_step_*"))


SMALL = ("training.steps=4", "training.groups=4", "training.samples=4", "evaluation.tasks=8")


def test_a_run_that_was_asked_to_stop_goes_on(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path / "run", *SMALL, "training.save_every=4")
    metrics = RunFolder(config.run.folder).metrics
    stopped = _train(config, stopping=lambda: metrics.exists() and '"step": 0, "reward"' in metrics.read_text())
    assert stopped == {"stopped": True, "steps": 2}
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


@pytest.mark.parametrize("overrides", [(), ("training.staleness=1",)], ids=["sync", "fully-async"])
def test_a_run_that_was_killed_goes_on(model: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = configured(model, tmp_path / "run", *SMALL, *overrides)
    file = tmp_path / "train.toml"
    file.write_text(dump(config))
    script = (
        "import sys; from pathlib import Path; from palestra.config import load; from bridges.skyrl.test_training import _train; "
    )
    script += "_train(load(Path(sys.argv[1])))"
    path = os.pathsep.join([str(RECIPE.parents[1] / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, "-c", script, str(file)], env={**os.environ, "PYTHONPATH": path})
    try:
        checkpoint = config.run.folder / "checkpoints" / "global_step_2" / "policy" / "policy.pt"
        deadline = time.monotonic() + 300
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert checkpoint.exists()
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


@pytest.mark.parametrize("left", [None, b"half a file"], ids=["none", "half"])
def test_a_checkpoint_without_its_last_file_is_given_up_for_the_one_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    """The fully async trainer names it the latest before that file is written."""
    config = configured(model, tmp_path / "run", *SMALL, "training.staleness=1")

    def lose(checkpoint: Path) -> None:
        state = checkpoint / AsyncTrainer.last_file
        state.unlink()
        if left is not None:
            state.write_bytes(left)

    _train_until_the_power_goes(config, monkeypatch, lose)
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


def _train_until_the_power_goes(config: Config, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], None]) -> None:
    """While the third checkpoint is saved, of which something is lost, before the ledger hears of it."""
    real = Account.commit

    def commit(self: Account, checkpoint: str) -> None:
        if checkpoint == "global_step_3":
            lose(config.run.folder / "checkpoints" / checkpoint)
            raise RuntimeError("the power went")
        real(self, checkpoint)

    monkeypatch.setattr(Account, "commit", commit)
    with pytest.raises(PalestraError, match="the power went"):
        _train(config)
    monkeypatch.undo()


@pytest.mark.parametrize("named", ["", "1"])
@pytest.mark.parametrize("last_file", [SyncTrainer.last_file, AsyncTrainer.last_file])
def test_a_first_checkpoint_without_its_last_file_leaves_none(tmp_path: Path, last_file: str, named: str) -> None:
    latest = tmp_path / "latest_ckpt_global_step.txt"
    go_back_to_complete(tmp_path, last_file)
    (tmp_path / "global_step_1").mkdir()
    latest.write_text(named)
    go_back_to_complete(tmp_path, last_file)
    assert not latest.exists()


@pytest.mark.parametrize("overrides", [(), ("training.staleness=1",)], ids=["sync", "fully-async"])
def test_a_run_that_was_killed_while_it_named_its_checkpoint_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = configured(model, tmp_path / "run", *SMALL, *overrides)

    def lose(checkpoint: Path) -> None:
        (checkpoint.parent / "latest_ckpt_global_step.txt").write_text("")
        (checkpoint / AsyncTrainer.last_file).unlink(missing_ok=True)  # it comes after the name

    _train_until_the_power_goes(config, monkeypatch, lose)
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


def test_a_crash_between_checkpoint_and_ledger_is_made_up_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, tmp_path / "run", *SMALL)
    real = Account.commit

    def lose(self: Account, checkpoint: str) -> None:
        if checkpoint == "global_step_2":
            raise RuntimeError("the power went")
        real(self, checkpoint)

    monkeypatch.setattr(Account, "commit", lose)
    with pytest.raises(PalestraError, match=r"SkyRL failed in step 2: RuntimeError: the power went; .*--resume"):
        _train(config)
    monkeypatch.undo()
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


def test_a_run_that_is_complete_trains_no_further_and_goes_back_where_a_checkpoint_is_damaged(
    model: Path, tmp_path: Path
) -> None:
    config = configured(model, tmp_path / "run", *SMALL)
    first = _train(config)
    again = _train(config, resume=True)
    assert again["evaluations"] == first["evaluations"]
    _assert_each_trained_once(config)

    newest = _checkpoints(config)[-1]
    (newest / "policy" / "policy.pt").write_bytes(b"half a file")
    with pytest.raises(PalestraError, match=r"SkyRL failed in step 0: .*--resume"):
        _train(config, resume=True)
    shutil.rmtree(newest)
    (config.run.folder / "checkpoints" / "latest_ckpt_global_step.txt").write_text("3")
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


def _assert_each_trained_once(config: Config) -> None:
    with Ledger.open(config.run.folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify() == []
        assert sorted(ledger.steps()) == [0, 1, 2, 3]
        rows = [row for row in ledger.trajectories(phase="train") if row.state in ("consumed", "filtered")]
    assert len(rows) == len({row.key for row in rows}) == 4 * 16


def test_an_engine_that_dies_ends_the_run_with_its_reason_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, tmp_path / "run", *SMALL, "dispatch.backoff=0.01")
    take = CpuEngine.take_weights

    def die(self: CpuEngine, weights: Any) -> None:
        take(self, weights)
        if self.weight_version == 3:
            self._sampler.close()

    monkeypatch.setattr(CpuEngine, "take_weights", die)
    with pytest.raises(PalestraError, match=r"the last 16 rollouts all failed; .*the sampler has stopped"):
        _train(config)
    monkeypatch.undo()
    assert _train(config, resume=True)["steps"] == 4
    _assert_each_trained_once(config)


def test_the_command_line_goes_to_skyrls_environment(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path / "run", *SMALL, "training.steps=1")
    file = tmp_path / "train.toml"
    file.write_text(dump(config))
    done = subprocess.run([sys.executable, "-m", "palestra", "train", str(file)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
