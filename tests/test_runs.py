import json
from pathlib import Path

import pytest

from palestra import config as configs
from palestra.config import Config
from palestra.errors import ConfigError, StorageError, UsageError
from palestra.ledger import Ledger, StepRecord
from palestra.runs import RunFolder, free_name
from palestra.verbs import evaluate, train


def make_config(folder: Path) -> Config:
    return configs.parse({"run": {"folder": str(folder), "seed": 3}, "tasks": {"heldout": "task:rows", "folder": str(folder)}})


def test_a_new_run_can_be_opened_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunFolder.create(tmp_path / "deep" / "run", config)
    assert run.cache.is_dir()
    assert run.checkpoints.is_dir()
    again, restored = RunFolder.reopen(tmp_path / "deep" / "run")
    assert (again.path, restored) == (run.path, config)


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = RunFolder.create(path, make_config(tmp_path))
    Ledger.open(run.ledger).close()
    with pytest.raises(StorageError, match=r"holds a run already; go on with `palestra train --resume .*run`.* --fresh"):
        RunFolder.create(path, make_config(tmp_path))


def test_an_attempt_that_never_began_is_no_run(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", make_config(tmp_path))
    other = make_config(tmp_path).model_copy(update={"run": configs.Run(folder=tmp_path, seed=9)})
    RunFolder.create(tmp_path / "run", other)
    assert RunFolder.reopen(tmp_path / "run")[1].run.seed == 9


def test_fresh_keeps_earlier_runs_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in range(3):
        run = RunFolder.create(path, make_config(tmp_path), fresh=True)
        run.ledger.write_text(str(number))
    assert [(tmp_path / name / "ledger.sqlite").read_text() for name in ("run.1", "run.2", "run")] == ["0", "1", "2"]


def test_the_folder_one_stands_in_cannot_be_kept_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ledger.sqlite").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write in \.: "):
        RunFolder.create(Path(), make_config(tmp_path), fresh=True)


def test_a_link_is_kept_aside_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").mkdir()
    RunFolder.create(tmp_path / "disk" / "rooms", make_config(tmp_path)).ledger.touch()
    (tmp_path / "runs" / "rooms").symlink_to(tmp_path / "disk" / "rooms")
    RunFolder.create(tmp_path / "runs" / "rooms", make_config(tmp_path), fresh=True)
    assert (tmp_path / "runs" / "rooms.1" / "ledger.sqlite").exists()
    assert not (tmp_path / "runs" / "rooms" / "ledger.sqlite").exists()


def test_a_run_that_is_being_written_is_not_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = RunFolder.create(path, make_config(tmp_path))
    with Ledger.open(run.ledger):
        with pytest.raises(StorageError, match="is being written by process"):
            RunFolder.create(path, make_config(tmp_path), fresh=True)
        assert not (tmp_path / "run.1").exists()
    RunFolder.create(path, make_config(tmp_path), fresh=True)
    assert (tmp_path / "run.1" / "ledger.sqlite").exists()


def test_free_name_skips_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "eval.1").mkdir()
    assert free_name(tmp_path / "eval") == tmp_path / "eval.2"


@pytest.mark.parametrize("name", ["nothing", "empty", "file"])
def test_what_is_no_run_is_not_resumed(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=rf"{name} is no run: it has no config\.toml; give the folder of a run"):
        RunFolder.reopen(tmp_path / name)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot write in .*file/run: Not a directory; nothing recorded before is lost"):
        RunFolder.create(tmp_path / "file" / "run", make_config(tmp_path))


def test_metrics_are_appended_and_read_back(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", make_config(tmp_path))
    assert run.read_metrics() == []
    for step in range(3):
        run.append_metrics({"step": step, "reward": 0.5})
    with run.metrics.open("a") as file:
        file.write('17\n{"reward": 0.5}\n\n')
    with run.metrics.open("ab") as raw:
        raw.write(b'{"step": 9, "\xff": 1}\n{"step": 3, "rew')  # a full disk
    assert run.read_metrics() == [{"step": step, "reward": 0.5} for step in range(3)]


def test_a_run_that_goes_on_forgets_the_rows_of_what_it_will_do_again(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", make_config(tmp_path))
    run.keep_metrics(3)
    assert run.read_metrics() == [], "there need not be any"
    rows = [{"step": 0, "evaluation": "sampled"}]
    for step in range(4):
        rows += [{"step": step, "reward": 0.5}, {"step": step + 1, "evaluation": "sampled"}]
    for row in rows:
        run.append_metrics(row)
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "rew')  # killed
    run.keep_metrics(2)
    assert run.read_metrics() == rows[:5], "steps 0 and 1, and the evaluations up to after step 1"
    run.append_metrics({"step": 2, "reward": 0.75})
    assert run.read_metrics() == [*rows[:5], {"step": 2, "reward": 0.75}]
    assert [path.name for path in run.path.iterdir() if path.suffix == ".part"] == []


def test_a_summary_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", make_config(tmp_path))
    run.write_summary({"final": 0.5})
    with pytest.raises(TypeError):
        run.write_summary({"final": object()})
    assert json.loads(run.summary.read_text()) == {"final": 0.5}
    run.write_summary({"final": 0.75})
    assert json.loads(run.summary.read_text()) == {"final": 0.75}


def test_a_run_does_not_go_back(tmp_path: Path) -> None:
    training = {"steps": 1, "groups": 1, "samples": 2, "learning_rate": 1e-4}
    tasks = {"train": "task:rows", "heldout": "task:rows", "folder": str(tmp_path)}
    run = RunFolder.create(tmp_path / "run", configs.parse({"run": {"folder": "run"}, "tasks": tasks, "training": training}))
    with Ledger.open(run.ledger) as ledger:
        ledger.commit_steps([StepRecord(0, {}, []), StepRecord(1, {}, [])], "step-00002")
    with pytest.raises(
        ConfigError, match=r"run has 2 steps behind it, so training\.steps = 1 .* is too few; set it to 2 or more"
    ):
        train(run.path, resume=True)


def test_an_evaluation_is_not_resumed_in_the_folder_of_a_training_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", make_config(tmp_path))
    run.append_metrics({"step": 0})
    run.write_summary({"steps": 4})
    with pytest.raises(
        UsageError, match=r"run is a run of `palestra train`; give the folder of an evaluation, such as .*eval\.1"
    ):
        evaluate(run.path, resume=True)
    assert json.loads(run.summary.read_text()) == {"steps": 4}
