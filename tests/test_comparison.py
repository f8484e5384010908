"""Comparisons of evaluations whose outcomes are known, in real ledgers."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from palestra.cli import main
from palestra.comparison import Cost, compare, cost_to_reach
from palestra.errors import UsageError
from palestra.ledger import Ledger
from palestra.message import ToolCall, assistant
from palestra.trajectory import Failure, Key, Phase, Segment, Trajectory, Turn

Outcomes = Mapping[str, Sequence[float | None]]


def recorded(folder: Path, evaluations: Mapping[tuple[Phase, int], Outcomes], tool: str = "look") -> str:
    """A run with these evaluations; None is an attempt that failed."""
    folder.mkdir(exist_ok=True)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        for (phase, step), outcomes in evaluations.items():
            for task, rewards in outcomes.items():
                for index, reward in enumerate(rewards):
                    ledger.record(Key(phase, step, task, index), attempt(task, index, reward, tool))
    return str(folder)


def attempt(task: str, index: int, reward: float | None, tool: str) -> Trajectory:
    if reward is None:
        return Trajectory(task, index, failure=Failure("run", "infrastructure", "gone"))
    calls = (ToolCall("0", tool, {}), ToolCall("1", "", {}, fault="not JSON"))
    segment = Segment([1, 2, 3], [False, True, True], [0.0] * 3, [-1, 0, 0])
    turn = Turn(assistant("", *calls), "stop", 0, (1, 3))
    return Trajectory(task, index, segments=[segment], turns=[turn], reward=reward, stop="finish")


def many(rate: float, seed: int) -> dict[str, list[float]]:
    chance = random.Random(seed)
    return {f"task-{number}": [float(chance.random() < rate)] for number in range(100)}


def test_one_run_is_compared_before_and_after(tmp_path: Path) -> None:
    evaluations: dict[tuple[Phase, int], Outcomes] = {
        ("eval", 0): many(0.2, 0),
        ("greedy", 0): {"task-0": [0.0]},
        ("eval", 4): many(0.5, 1),
        ("eval", 8): many(0.9, 2),
        ("greedy", 8): {"task-0": [1.0]},
    }
    compared = compare(recorded(tmp_path, evaluations))
    assert (compared.before, compared.after) == (f"{tmp_path}@0", f"{tmp_path}@8")
    rate = compared.pairs["sampled"].pass_at[1]
    assert rate.difference.value == pytest.approx(rate.after.value - rate.before.value)
    assert 0.4 < rate.difference.low < rate.difference.value < rate.difference.high < 0.9
    assert compared.pairs["greedy"].pass_at[1].difference.value == 1.0
    middle = compare(f"{tmp_path}@4", f"{tmp_path}@8")
    assert middle.before == f"{tmp_path}@4"
    assert middle.pairs["sampled"].pass_at[1].before.value == pytest.approx(sum(v[0] for v in many(0.5, 1).values()) / 100)


def test_attempts_without_a_counterpart_are_left_out(tmp_path: Path) -> None:
    before = recorded(tmp_path / "a", {("eval", 0): {"x": [1.0, 0.0, 0.0], "y": [0.0, None, 0.0], "only": [1.0]}})
    after = recorded(tmp_path / "b", {("eval", 0): {"x": [1.0, 1.0, None], "y": [1.0, 1.0, 0.0]}})
    pairs = compare(before, after).pairs["sampled"]
    assert (pairs.tasks, pairs.attempts, pairs.left_out) == (2, 4, 3)
    assert (pairs.pass_at[1].before.value, pairs.pass_at[1].after.value) == (0.25, 0.75)
    assert (pairs.pass_at[2].before.value, pairs.pass_at[2].after.value) == (0.5, 1.0)
    assert list(pairs.pass_at) == [1, 2]


def test_what_an_attempt_took_stands_beside(tmp_path: Path) -> None:
    before = recorded(tmp_path / "a", {("eval", 0): {"x": [0.0]}}, tool="bash")
    after = recorded(tmp_path / "b", {("eval", 0): {"x": [1.0]}}, tool="search")
    assert compare(before, after).pairs["sampled"].means == {
        "turns": (1, 1),
        "tokens sampled": (2, 2),
        "hints": (0, 0),
        "calls of bash": (1, 0),
        "unreadable calls": (1, 1),
        "calls of search": (0, 1),
    }


def test_the_cost_of_a_reward_is_that_of_the_training_before_it() -> None:
    metrics = [
        {"step": 0, "evaluation": "sampled", "pass@1": {"value": 0.9}},
        {"step": 0, "reward": 0.1, "sampled_tokens": 100, "seconds": 10.0, "cpu_seconds": 15.0},
        {"step": 1, "reward": 0.3, "sampled_tokens": 200, "seconds": 20.0, "cpu_seconds": 25.0},
        {"step": 2, "reward": 0.7, "sampled_tokens": 400, "seconds": 40.0, "cpu_seconds": 45.0},
        {"step": 3, "reward": 0.6, "sampled_tokens": 800, "seconds": 80.0, "cpu_seconds": 85.0},
    ]
    assert cost_to_reach(metrics, 0.6) == Cost(2, 300, 30.0, 40.0)
    assert cost_to_reach(metrics, 0.05) == Cost(0, 0, 0.0, 0.0)
    assert cost_to_reach(metrics, 0.8) is None


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    a, b = recorded(tmp_path / "a", {("eval", 0): {"x": [1.0]}}), recorded(tmp_path / "b", {("eval", 0): {"y": [1.0]}})
    nothing = recorded(tmp_path / "c", {("train", 0): {"x": [1.0]}})
    with pytest.raises(UsageError, match="have no attempt at the same task"):
        compare(a, b)
    with pytest.raises(UsageError, match="was not evaluated after 3 steps, but after 0"):
        compare(f"{a}@3", b)
    with pytest.raises(UsageError, match="one evaluation only; give another one"):
        compare(a)
    with pytest.raises(UsageError, match="has no evaluation yet"):
        compare(nothing)
    with pytest.raises(UsageError, match="there is no ledger here"):
        compare(str(tmp_path / "nowhere"))


def test_the_command_prints_and_writes_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run", {("eval", 0): many(0.1, 0), ("eval", 2): many(0.9, 1)})
    steps = {"sampled_tokens": 1000, "seconds": 1.0, "cpu_seconds": 2.0}
    metrics = [{"step": step, "reward": reward, **steps} for step, reward in enumerate((0.1, 0.2, 0.9))]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    assert main(["compare", run, "--reach", "0.8", "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "calls of look, for an attempt" in said
    assert f"{run}: a step earned that after 2 updates, 2,000 tokens sampled, 2 s, 4 CPU-seconds" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["pairs"]["sampled"]["pass_at"]["1"]["difference"]["low"] > 0.6
    assert main(["compare", str(tmp_path)]) == 2
