"""Finding tasks by name, and the order in which training takes them."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from playing import Probe

from palestra.config import Tasks
from palestra.errors import ConfigError, TaskError
from palestra.taskset import batch, find_object, load

MODULE = """
from palestra import Task

class Row(Task[None, None]):
    pass

rows = [Row("a"), Row("b")]

def some(count: int = 2, prefix: str = "row") -> list[Row]:
    return [Row(f"{prefix}-{number}") for number in range(count)]

def lazily():
    yield from rows

def needy(path):
    return []

number = 7
strings = ["a"]
empty = []
twice = [Row("a"), Row("b"), Row("a")]
numbered = [Row(0)]

def leaving():
    raise SystemExit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(MODULE)
    return tmp_path


def section(folder: Path, heldout: str, **options: object) -> Tasks:
    return Tasks(heldout=heldout, folder=folder, **options)  # type: ignore[arg-type]


def ids(tasks: object) -> list[str]:
    return [task.id for task in tasks]  # type: ignore[attr-defined]


def test_a_sequence_a_function_and_a_generator(folder: Path) -> None:
    assert ids(load(section(folder, "task:rows"), "heldout")) == ["a", "b"]
    assert ids(load(section(folder, "task:some"), "heldout")) == ["row-0", "row-1"]
    assert ids(load(section(folder, "task:lazily"), "heldout")) == ["a", "b"]


def test_arguments_go_to_the_function(folder: Path) -> None:
    tasks = load(section(folder, "task:some", arguments={"count": 3, "prefix": "x"}), "heldout")
    assert ids(tasks) == ["x-0", "x-1", "x-2"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("task:some", {"cuont": 3}, ["tasks.arguments", "'cuont': 3", "'task:some'", "unexpected keyword argument 'cuont'"]),
        ("task:needy", {}, ["tasks.arguments", "'task:needy'", "missing a required argument: 'path'"]),
        ("task:rows", {"count": 3}, ["tasks.arguments", "'task:rows'", "it is list, not a function"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(folder: Path, name: str, arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(section(folder, name, arguments=arguments), "heldout")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("task", ConfigError, """tasks.heldout = 'task': write module:object, such as "task:train\""""),
        (":rows", ConfigError, "write module:object"),
        ("task:", ConfigError, "write module:object"),
        ("task:row", ConfigError, "tasks.heldout = 'task:row': task has no 'row'; did you mean 'rows'?"),
        ("tusk:rows", ConfigError, "tasks.heldout: no module 'tusk', neither"),
        ("task.py:rows", ConfigError, "tasks.heldout: no module 'task.py', neither"),
        ("no/such/task:rows", ConfigError, "no module 'no/such/task'"),
        ("task:number", TaskError, "tasks.heldout = 'task:number' gives int; it must give a sequence of tasks"),
        ("task:strings", TaskError, "holds str; every item must be a Task"),
        ("task:empty", TaskError, "tasks.heldout = 'task:empty' has no tasks"),
        ("task:twice", TaskError, "has two tasks with the id 'a'"),
        ("task:numbered", TaskError, "has a task with the id 0; an id is text, such as '0'"),
        ("task:leaving", TaskError, "tasks.heldout = 'task:leaving' ends the program: SystemExit: 0 (leaving, line "),
    ],
)
def test_what_is_wrong_is_named(folder: Path, name: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        load(section(folder, name), "heldout")
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_key_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the key 'tasks\.train' is missing; write train = \"module:object\""):
        load(section(folder, "task:rows"), "train")


def test_a_bug_in_the_users_module_is_shown_as_it_is(folder: Path) -> None:
    (folder / "task.py").write_text("import surely_not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed_anywhere"):
        load(section(folder, "task:rows"), "heldout")
    (folder / "task.py").write_text("rows = 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load(section(folder, "task:rows"), "heldout")
    (folder / "task.py").write_text(MODULE)
    assert ids(load(section(folder, "task:rows"), "heldout")) == ["a", "b"], "a module that broke is not remembered"


def test_a_module_that_ends_the_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(TaskError, match=r"tasks.heldout = 'task:rows' ends the program: SystemExit: 0 \(<module>, line 2\)"):
        load(section(tmp_path, "task:rows"), "heldout")


def test_a_data_set_that_ends_the_program_as_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import sys\ndef rows():\n    yield sys.exit(3)\n")
    with pytest.raises(TaskError, match=r"tasks.heldout = 'task:rows' ends the program: SystemExit: 3 \(rows, line 3\)"):
        load(section(tmp_path, "task:rows"), "heldout")


def test_two_recipes_may_both_have_a_module_called_task(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text(f"value = {name!r}\n")
    found = [find_object("task:value", tmp_path / name, "tasks.train") for name in ("one", "two", "one")]
    assert found == ["one", "two", "one"]


def test_the_modules_of_a_recipe_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "palestra_test_parts.py").write_text("rows = [1]\n")
    (tmp_path / "task.py").write_text("from palestra_test_parts import rows\n")
    assert find_object("task:rows", tmp_path, "tasks.train") == [1]


def test_an_installed_module_is_found(tmp_path: Path) -> None:
    assert find_object("palestra.task:Task", tmp_path, "tasks.train").__name__ == "Task"


# Batches

TASKS = [Probe(f"task-{number}") for number in range(10)]


def steps(count: int, size: int, seed: int = 0) -> list[list[str]]:
    return [[task.id for task in batch(TASKS, step, size, seed)] for step in range(count)]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 10])
def test_no_task_is_twice_in_a_step_or_in_an_epoch(size: int) -> None:
    per_epoch = 10 // size
    for epoch in range(6):
        taken = [name for step in steps(6 * per_epoch, size)[epoch * per_epoch : (epoch + 1) * per_epoch] for name in step]
        assert len(taken) == per_epoch * size
        assert max(Counter(taken).values()) == 1


def test_every_task_gets_its_turn_and_every_epoch_has_an_order_of_its_own() -> None:
    epochs = [tuple(names) for names in steps(8, 10)]
    assert len(set(epochs)) == 8
    counts = Counter(name for names in steps(300, 3) for name in names)
    assert set(counts) == {task.id for task in TASKS}
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_the_order_follows_from_the_seed_alone() -> None:
    assert steps(9, 4) == steps(9, 4)
    assert steps(9, 4) != steps(9, 4, seed=1)
    assert [task.id for task in batch(TASKS, 7, 4, 0)] == steps(8, 4)[7], "a resumed run need not begin at step 0"
