"""The quickstart recipe: sound tasks, a calculator that cannot be hurt, and a problem solved from end to end."""

import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from palestra import check, config, evaluate, taskset
from palestra.errors import ToolError
from palestra.tool import Tool
from palestra.trajectory import Stop, Trajectory

MakeFolder = Callable[..., Path]

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
TOML = RECIPE / "train.toml"


def find(name: str) -> Any:
    return taskset.find_object(f"task:{name}", RECIPE, "test")


def tasks(key: str) -> list[Any]:
    return taskset.load(config.load(TOML).tasks, key)


def test_training_and_held_out_problems_never_overlap() -> None:
    train, heldout = tasks("train"), tasks("heldout")
    assert len(train) > len(heldout) >= 100
    assert not {task.id for task in train} & {task.id for task in heldout}
    assert not {task.question for task in train} & {task.question for task in heldout}
    assert len({task.question for task in (*train, *heldout)}) == len(train) + len(heldout)


def test_no_problem_is_a_worked_example() -> None:
    shown = {question for question, _, _ in find("EXAMPLES")}
    assert len(shown) == 3
    assert not shown & {task.question for task in (*tasks("train"), *tasks("heldout"))}


def test_the_worked_examples_are_right() -> None:
    for _, expression, result in find("EXAMPLES"):
        assert find("calculator")(expression) == result


def test_the_problems_are_the_same_every_time() -> None:
    before = [*tasks("heldout"), *tasks("train")]
    find("_all").cache_clear()
    assert [*tasks("heldout"), *tasks("train")] == before


def test_every_answer_is_right() -> None:
    """Computed anew from the words of the question."""
    patterns = {
        r"has (\d+) \w+ and finds (\d+) more": lambda a, b: a + b,
        r"has (\d+) \w+ and gives away (\d+)\.": lambda a, b: a - b,
        r"fills (\d+) boxes with (\d+) ": lambda a, b: a * b,
    }
    seen = set()
    for task in (*tasks("train"), *tasks("heldout")):
        [(pattern, found)] = [(p, match) for p in patterns if (match := re.search(p, task.question))]
        assert task.answer == patterns[pattern](*map(int, found.groups()))
        seen.add(pattern)
    assert seen == set(patterns)


def test_gold_scores_1_and_doing_nothing_0(tmp_path: Path) -> None:
    result = check(TOML, f"run.folder={tmp_path}", sample=60)
    del result["seconds"]
    assert result == {"tasks": 60, "gold": 60, "noop": 60, "failures": {}}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 7", "19"),
        ("6*15", "90"),
        ("-(3 - 10) * 2", "14"),
        ("1 +\t1 ", "2"),
        ("999999999 * 999999999", "999999998000000001"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert find("calculator")(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2 ** 100000",
        "1 << 100000",
        "9" * 5000,
        "1000000000 + 1",
        "12 / 5",
        "7 // 2",
        "7 % 2",
        "1.5 + 1",
        "1e9",
        "1 +",
        "",
        "   ",
        "12 + x",
        "x",
        "__import__('os').system('true')",
        "().__class__",
        "open('/etc/passwd')",
        "[1] * 999999999",
        "'a' * 999999999",
        "(lambda: 1)()",
        "1 and 1",
        "1 if 1 else 2",
        "x := 5",
        "12 + 7; 5",
        "12 + 7\n5",
        "import os",
        "１２ ＋ ７",
        "twelve + 七",
        "12 − 7",
        "5 × 6",
        "\x00",
        "12 + \x00 7",
        "\ud800",
        "🏛️",
        "(" * 10_000 + "1" + ")" * 10_000,
        "-" * 100_000 + "1",
        "-" * 3000 + "1",
        "1" + "+1" * 50_000,
        "1" + "*999999999" * 50_000,
    ],
)
def test_a_hostile_expression_is_told_to_the_model(expression: str) -> None:
    with pytest.raises(ToolError, match=r"^cannot compute .*; write an expression such as 12 \+ 7$") as error:
        find("calculator")(expression)
    assert len(str(error.value)) < 700, "the answer is short, whatever was asked"


@pytest.mark.parametrize("name", ["calculator", "finish"])
def test_the_tools_describe_every_parameter(name: str) -> None:
    [described] = Tool.of(find(name)).parameters["properties"].values()
    assert described["type"] == "string"
    assert described["description"]


ORACLE = '''
import re

from palestra import ToolCall, assistant


def oracle(said):
    """Computes what the last question asks for, and hands in what the calculator said."""
    question, results = said.split("<|im_start|>user\\n")[-1], re.findall(r"tool_response>\\n(-?\\d+)\\n</tool", said)
    if question.startswith("<tool_response>"):
        return assistant("", ToolCall("", "finish", {"answer": results[-1]}))
    a, b = re.findall(r"\\d+", question)
    sign = "+" if "finds" in question else "-" if "gives away" in question else "*"
    return assistant("", ToolCall("", "calculator", {"expression": f"{a} {sign} {b}"}))


def guess(said):
    return assistant("", ToolCall("", "finish", {"answer": "12"}))
'''


@pytest.mark.parametrize(("script", "rate", "turns"), [("oracle", 1.0, 2.0), ("guess", 0.0, 1.0)])
def test_an_oracle_solves_the_problems_and_a_guess_does_not(
    tmp_path: Path, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch, script: str, rate: float, turns: float
) -> None:
    (tmp_path / "palestra_test_oracle.py").write_text(ORACLE)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = config.load(
        TOML,
        [
            f"run.folder={tmp_path / 'run'}",
            "backend.kind=scripted",
            f"backend.script=palestra_test_oracle:{script}",
            f"backend.model={make_folder('smollm2')}",
            "evaluation.tasks=12",
            "agent.context=4000",
            "sampling.max_tokens=200",
        ],
    )
    result = evaluate(loaded, quiet=True)
    assert (result.success.value, result.tasks, result.turns, result.failures) == (rate, 12, turns, {})


@pytest.mark.parametrize(
    ("stop", "answer", "reward"),
    [("finish", "{right}", 1.0), ("finish", " {right}\n", 1.0), ("finish", "{right}0", 0.0), ("answer", "{right}", 0.0)],
)
async def test_what_counts_is_the_answer_handed_in(stop: Stop, answer: str, reward: float) -> None:
    task = tasks("heldout")[0]
    trajectory = Trajectory(task.id, 0, stop=stop)
    assert await task.score(answer.format(right=task.answer), trajectory, AsyncExitStack()) == reward


def test_the_prompt_ends_with_the_question() -> None:
    for task in tasks("heldout")[:5]:
        first, *_, last = task.prompt(None)
        assert (first.role, last.role, last.text) == ("system", "user", task.question)
