"""The command line, in process and once as a process of its own: bad input is one line and exit code 2, never a traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

import palestra
from palestra.cli import main
from palestra.ledger import Ledger

MakeFolder = Callable[..., Path]

MODULE = '''
from dataclasses import dataclass

from palestra import Finish, Task, ToolCall, assistant, user


def look(at: str) -> str:
    """Look.

    Args:
        at: what
    """
    return f"[bold]There[/bold] is {at}."


def done(answer: str) -> Finish:
    """Hand in."""
    return Finish(answer)


def untyped(x):
    """Has no type hint."""
    return x


@dataclass(frozen=True)
class Row(Task[None, str]):
    right: str = "tea"
    odd: bool = False
    wrong_gold: bool = False
    always: bool = False
    more: tuple = ()

    async def prepare(self, cache):
        (cache / self.id).touch()  # the cache must be there

    def prompt(self, env):
        return [user(f"{self.id}: what is it?")]

    def tools(self, env):
        return [look, done, *self.more]

    async def score(self, artifact, trajectory, stack):
        if self.odd:
            return "much"
        return 1.0 if self.always or artifact == self.right else 0.0

    async def solve(self, env):
        return "coffee" if self.wrong_gold else self.right


def train():
    return [Row(f"train-{n}") for n in range(3)]


def heldout(count=4):
    """Every other task has another answer than the script gives."""
    return [Row(f"held-{n}", right="tea" if n % 2 == 0 else "coffee") for n in range(count)]


odd = [Row("fine"), Row("odd", odd=True)]
untyped_tool = [Row("fine"), Row("bad-tool", more=(untyped,))]
wrong = [Row("fine"), Row("wrong", wrong_gold=True), Row("free", always=True)]


class Unprepared(Row):
    async def prepare(self, cache):
        raise OSError("no network")


class Broken(Row):
    def prompt(self, env):
        raise KeyError("oh")


unprepared = [Row("fine"), Unprepared("dry")]
broken = [Broken("broken")]


def script(said):
    if "tool_response" not in said:
        return assistant("I look.", ToolCall("", "look", {"at": "tea"}))
    return assistant("", ToolCall("", "done", {"answer": "tea"}))
'''


class Place(SimpleNamespace):
    """A folder with tasks, a config and a scripted backend."""

    folder: Path
    config: Path
    values: dict[str, dict[str, object]]

    def write(self, **sections: dict[str, object]) -> str:
        self.config.write_text(tomli_w.dumps(self.values | sections))
        return str(self.config)


@pytest.fixture
def place(tmp_path: Path, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(MODULE)
    values: dict[str, dict[str, object]] = {
        "run": {"folder": str(tmp_path / "runs" / "x")},
        "tasks": {"train": "task:train", "heldout": "task:heldout"},
        "backend": {"kind": "scripted", "script": "task:script", "model": str(make_folder("smollm2")), "renderer": "hermes"},
        "training": {"steps": 1, "groups": 2, "samples": 2, "learning_rate": 1e-4},
    }
    made = Place(folder=tmp_path, config=tmp_path / "train.toml", values=values)
    made.write()
    return made


Complaint = Callable[[Sequence[str]], str]


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """Runs a command that must be refused, and gives its one line."""

    def run(arguments: Sequence[str], code: int = 2) -> str:
        assert main(arguments) == code
        said = capsys.readouterr()
        [line] = said.err.splitlines()
        assert "Traceback" not in said.out + said.err
        assert line.startswith("palestra: ")
        return line.removeprefix("palestra: ")

    return run


# Bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "{config}", "agent.turn=3"], ["{config}", "unknown key 'agent.turn'", "did you mean 'turns'?"]),
        (["eval", "{config}", "agnet.turns=3"], ["{config}", "unknown key 'agnet'", "did you mean 'agent'?"]),
        (["eval", "{config}", "agent.turns=lots"], ["{config}", "agent.turns = 'lots'", "valid integer"]),
        (["eval", "{config}", "turns=3"], ["override 'turns=3'", "section.key=value"]),
        (["eval", "{config}", "agent.turns"], ["override 'agent.turns'", "section.key=value"]),
        (["eval", "none.toml"], ["no config file none.toml", "give the path of a .toml file"]),
        (["eval", "{folder}"], ["{folder} is a folder", "give the .toml file in it"]),
        (["eval", "task.py"], ["task.py: not valid TOML"]),
        (
            ["eval", "{config}", "backend.model=no/such/folder"],
            ["no/such/folder", "no tokenizer.json here", "give the folder of a model"],
        ),
        (["eval", "{config}", "backend.script=task:scrip"], ["backend.script = 'task:scrip'", "did you mean 'script'?"]),
        (["eval", "{config}", "tasks.heldout=task:heldot"], ["tasks.heldout = 'task:heldot'", "did you mean 'heldout'?"]),
        (["eval", "{config}", "tasks.heldout=tusk:heldout"], ["tasks.heldout", "no module 'tusk'"]),
        (["eval", "{config}", "tasks.heldout=task.py"], ["tasks.heldout = 'task.py'", "module:object"]),
        (
            ["eval", "{config}", "tasks.heldout=task:odd"],
            ["task 'odd'", "score() returned 'much'", "must return a finite number"],
        ),
        (["eval", "{config}", "tasks.heldout=task:untyped_tool"], ["tool 'untyped'", "parameter 'x' has no type hint", "x: str"]),
        (["eval", "{config}", "tasks.heldout=task:unprepared"], ["task 'dry': prepare() failed", "no network"]),
        (
            ["check", "{config}", "tasks.heldout=task:odd"],
            ["task 'odd'", "score() returned 'much'", "must return a finite number"],
        ),
        (
            ["check", "{config}", "tasks.heldout=task:untyped_tool"],
            ["tool 'untyped'", "parameter 'x' has no type hint", "x: str"],
        ),
        (["check", "{config}", "tasks.heldout=task:unprepared"], ["task 'dry': prepare() failed", "no network"]),
        (["check", "{config}", "--only", "held-1,hold-2"], ["--only: no task 'hold-2'", "did you mean 'held-2'?"]),
        (["check", "{config}", "--sample", "-1"], ["--sample -1", "1 or more"]),
        (["check", "{config}", "--json", "{config}/x.json"], ["--json {config}/x.json", "{config} cannot be written"]),
        (["bench", "dispatch", "--json", "{folder}"], ["--json {folder}", "this is a folder; name a file in it"]),
        (["plan", "{folder}", "--picture", "{folder}"], ["--picture {folder} is a folder", "{folder}/plan.png"]),
        (["bench", "dispatch", "--seeds=0,-1"], ["--seeds 0,-1", "whole numbers from 0 on"]),
        (["bench", "dispatch", "--real", "--piece=64"], ["--piece has no effect with --real"]),
        (["bench", "dispatch", "--pictures", "{folder}", "--json", "{folder}/x"], ["--json has no effect with --pictures"]),
        (["bench", "dispatch", "--pictures", "{config}"], ["--pictures {config}", "give a folder that can be written"]),
        (
            ["check", "{config}", "tasks.arguments.cuont=3", "tasks.train=task:heldout"],
            ["tasks.arguments", "'cuont'", "'task:heldout'"],
        ),
        (["try", "{config}", "--task", "hold-1"], ["--task: no held-out task 'hold-1'", "did you mean 'held-1'?"]),
        (["try", "{config}", "tasks.heldout=task:unprepared", "--task", "dry"], ["task 'dry': prepare() failed", "no network"]),
        (
            ["train", "{config}", "tasks.heldout=task:train"],
            ["task 'train-0'", "tasks.train", "tasks.heldout", "must not be trained on"],
        ),
        (["train", "{config}", "training.groups=9"], ["training.groups = 9", "the 3 tasks of tasks.train"]),
        (["train", "{config}"], ["backend.kind = 'scripted' cannot train", 'use "torch"']),
        (["train"], ["train takes a config file, or --resume RUN"]),
        (["train", "{config}", "--resume", "{folder}"], ["train takes a config file, or --resume RUN"]),
        (["eval"], ["eval takes a config file, or --resume FOLDER"]),
        (["eval", "--resume", "{folder}"], ["{folder} is no run"]),
        (["train", "--resume", "{folder}/nothing"], ["{folder}/nothing is no run", "give the folder of a run"]),
        (["train", "--resume", "{folder}"], ["{folder} is no run: it has no config.toml"]),
    ],
)
def test_bad_input_is_one_line_that_names_it(place: Place, complaint: Complaint, arguments: list[str], words: list[str]) -> None:
    def fill(text: str) -> str:
        return text.format(config=place.config, folder=place.folder)

    line = complaint([fill(argument) for argument in arguments])
    for word in words:
        assert fill(word) in line


def test_missing_sections_and_keys(place: Place, complaint: Complaint) -> None:
    place.values["tasks"] = {"heldout": "task:heldout"}
    assert "the key 'tasks.train' is missing; write train = \"module:object\"" in complaint(["train", place.write()])
    del place.values["training"]
    assert "the section [training] is missing" in complaint(["train", place.write()])
    del place.values["run"]
    assert "the key 'run' is missing" in complaint(["eval", place.write()])


def test_a_missing_model_folder_of_the_embedded_backend(place: Place, complaint: Complaint) -> None:
    pytest.importorskip("torch")
    config = place.write(backend={"kind": "torch", "model": "/no/such/model"})
    assert "no model folder '/no/such/model'; give an existing folder" in complaint(["eval", config])
    assert "no model folder '/no/such/model'" in complaint(["train", config])
    # Nothing has begun, so the corrected config need not be told to start afresh.
    assert "cannot train" in complaint(["train", place.write()])


def test_a_folder_that_holds_a_run_is_refused(place: Place, complaint: Complaint) -> None:
    run = place.folder / "runs" / "x"
    run.mkdir(parents=True)
    Ledger.open(run / "ledger.sqlite").close()
    line = complaint(["train", str(place.config)])
    assert f"{run} holds a run already; go on with `palestra train --resume {run}`" in line
    assert "--fresh" in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["evaluate"],
        ["check", "{config}", "--smaple", "3"],
        ["check", "{config}", "--sample", "x"],
        ["eval", "a", "--task=3"],
    ],
)
def test_wrong_words_on_the_command_line(place: Place, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([argument.format(config=place.config) for argument in arguments])
    assert left.value.code == 2
    assert "usage: palestra" in capsys.readouterr().err


def test_an_override_may_stand_behind_an_option(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(place.config), "--only", "held-0", "tasks.heldout=task:wrong", "tasks.train=task:heldout"]) == 0
    assert capsys.readouterr().out == "1 tasks: gold scores 1 in 1, doing nothing scores 0 in 1\n"


# check


def test_check_of_sound_tasks(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(place.config), "--json", "out.json"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert 0 < found["seconds"]["median"] <= found.pop("seconds")["most"]
    assert found == {"tasks": 7, "gold": 7, "noop": 7, "failures": {}}
    assert capsys.readouterr().out == "7 tasks: gold scores 1 in 7, doing nothing scores 0 in 7\n"


def test_check_names_what_is_not_sound(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(place.config), "tasks.heldout=task:wrong", "tasks.train=task:broken", "--json", "out.json"]) == 1
    found = json.loads(Path("out.json").read_text())
    assert (found["tasks"], found["gold"], found["noop"]) == (4, 2, 2)
    assert found["failures"]["wrong"] == ["the gold solution scores 0, not 1"]
    assert found["failures"]["free"] == ["doing nothing scores 1, not 0"]
    assert [problem[:42] for problem in found["failures"]["broken"]] == [
        "gold: run failed (bug): KeyError: 'oh' (pr",
        "noop: run failed (bug): KeyError: 'oh' (pr",
    ]
    assert set(found["failures"]) == {"wrong", "free", "broken"}
    assert "wrong: the gold solution scores 0, not 1\n" in capsys.readouterr().out


def test_check_of_some(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(place.config), "--only", "held-0,train-2"]) == 0
    assert main(["check", str(place.config), "--sample", "3"]) == 0
    assert main(["check", str(place.config), "--sample", "300"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "3", "7"]


async def test_the_verbs_can_be_called_where_a_loop_runs_already(place: Place) -> None:
    assert palestra.check(place.config, only=["held-0"])["gold"] == 1  # as in a notebook's cell


# try


def test_try_shows_every_turn(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", str(place.config), "--task", "held-2"]) == 0
    out = capsys.readouterr().out
    words = ["held-2: what is it?", "I look.", "→ look({'at': 'tea'})", "[bold]There[/bold] is tea.", "→ done({'answer': 'tea'})"]
    places = [out.index(word) for word in words]
    assert places == sorted(places)
    assert "held-2: stop finish, answer 'tea', reward 1" in out
    assert not (place.folder / "runs").exists(), "to try a task leaves nothing behind"


def test_try_takes_the_first_task_and_tells_of_a_failure(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", str(place.config)]) == 0
    assert "held-0: stop finish" in capsys.readouterr().out
    assert main(["try", str(place.config), "tasks.heldout=task:broken"]) == 1
    assert "run failed (bug): KeyError: 'oh'" in capsys.readouterr().out


# eval


def test_eval_in_process(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(place.config), "evaluation.samples=4", "--json", "out.json"]) == 0
    out = capsys.readouterr().out
    assert "sampled: pass@1 0.50 [0.15, 0.85], pass@2 0.50 [0.15, 0.85], pass@4 0.50 [0.15, 0.85] on 4 tasks" in out
    result = json.loads(Path("out.json").read_text())
    for k in (1, 2, 4):
        assert result[f"pass@{k}"] == {
            "value": 0.5,
            "low": pytest.approx(0.1500, abs=1e-4),
            "high": pytest.approx(0.85, abs=1e-4),
        }
    assert (result["tasks"], result["samples"], result["reward"], result["turns"]) == (4, 4, 0.5, 2.0)
    assert (result["stops"], result["failures"]) == ({"finish": 16}, {})
    run = place.folder / "runs" / "x" / "eval.1"
    assert json.loads((run / "summary.json").read_text()) == result
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.counts() == {"eval": {"evaluated": 16}}
        assert ledger.verify() == []


def test_eval_again_is_a_new_evaluation(place: Place) -> None:
    for _ in range(2):
        assert main(["eval", str(place.config), "evaluation.tasks=1"]) == 0
    runs = place.folder / "runs" / "x"
    assert sorted(path.name for path in runs.iterdir()) == ["eval.1", "eval.2"]
    assert [json.loads((run / "summary.json").read_text())["pass@1"]["value"] for run in sorted(runs.iterdir())] == [1.0, 1.0]


def test_eval_counts_failures_apart(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "task.py").write_text(MODULE + "\nmixed = [Row('fine'), Broken('broken')]\n")
    assert main(["eval", str(place.config), "tasks.heldout=task:mixed", "--json", "out.json"]) == 0
    result = json.loads(Path("out.json").read_text())
    assert (result["pass@1"]["value"], result["tasks"], result["failures"]) == (1.0, 1, {"run/bug": 1})
    assert "1 run/bug" in capsys.readouterr().out


def test_as_a_process_of_its_own(place: Place) -> None:
    """What a person types, with a terminal's exit codes and streams."""

    def palestra(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "import sys; from palestra.cli import main; sys.exit(main())", *arguments]
        environment = os.environ | {"COLUMNS": "120", "TERM": "dumb"}
        return subprocess.run(command, capture_output=True, text=True, cwd=place.folder, env=environment)

    good = palestra("eval", "train.toml", "evaluation.samples=2", "--json", "out.json")
    assert (good.returncode, good.stderr) == (0, "")
    assert "pass@1 0.50 [0.15, 0.85], pass@2 0.50 [0.15, 0.85]" in good.stdout
    assert json.loads((place.folder / "out.json").read_text())["pass@2"]["value"] == 0.5
    bad = palestra("check", "train.toml", "tasks.heldout=task:untyped_tool")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "palestra: tool 'untyped': parameter 'x' has no type hint; write e.g. `x: str`\n"


def test_backends_says_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    assert main(["backends"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "plays given replies" in rows["scripted"]
    assert "no: palestra backends install tinker" in rows["tinker"]
    assert "tinker 0.24.1" in rows["tinker"]


def test_a_command_says_which_environment_must_first_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    recipe = Path(__file__).parents[1] / "recipes" / "bridges" / "tinker.toml"
    for verb in ("train", "eval", "try"):
        assert main([verb, str(recipe), f"run.folder={tmp_path / 'run'}"]) == 2
        assert capsys.readouterr().err.endswith("palestra backends install tinker\n")
    assert not (tmp_path / "run").exists()
