from contextlib import AsyncExitStack
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import numpy as np
import pytest

from palestra.errors import TaskError
from palestra.message import user
from palestra.task import Score, Task, as_prompt, as_score
from palestra.trajectory import Trajectory


@dataclass(frozen=True)
class Sum(Task[None, int]):
    a: int = 1
    b: int = 2

    async def score(self, artifact: int, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return float(artifact == self.a + self.b)


async def test_a_task_needs_little_more_than_a_score() -> None:
    task = Sum("sum-1", b=4)
    trajectory = Trajectory(task.id, 0, answer=5)
    async with AsyncExitStack() as stack:
        await task.prepare(Path())
        env = await task.setup(stack)
        assert await task.score(await task.harvest(env, trajectory), trajectory, stack) == 1.0


def test_a_task_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Sum("sum-1").a = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", ["prompt", "tools"])
def test_what_a_task_lacks_is_named(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"Sum has no {name}\(\)"):
        getattr(Sum("sum-1"), name)(None)


@pytest.mark.parametrize("name", ["prepare", "setup", "harvest", "score", "solve"])
def test_a_synchronous_method_is_refused_when_the_class_is_written(name: str) -> None:
    def method(self: object, *arguments: object) -> float:
        return 1.0

    with pytest.raises(TaskError, match=rf"Broken\.{name} must be asynchronous; write `async def {name}`"):
        type("Broken", (Task,), {name: method})


def test_a_synchronous_method_from_a_mixin_is_refused() -> None:
    class AlwaysRight:
        def score(self, artifact: object, trajectory: Trajectory, stack: AsyncExitStack) -> float:
            return 1.0

    with pytest.raises(TaskError, match=r"Mixed\.score must be asynchronous"):
        type("Mixed", (AlwaysRight, Task), {})


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), Score(1), Score(True)])
def test_any_finite_number_is_a_score(value: object) -> None:
    score = as_score(value, "t")
    assert score == Score(1.0)
    assert type(score.reward) is float


def test_the_metrics_of_a_score_are_kept() -> None:
    assert as_score(Score(0, {"tests": 3.0}), "t") == Score(0.0, {"tests": 3.0})


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0], Score(float("nan")), Score(None)])  # type: ignore[arg-type]
def test_anything_else_is_refused_and_names_the_task(value: object) -> None:
    with pytest.raises(TaskError, match=r"task 'sum-1': score\(\) returned .*; it must return a finite number"):
        as_score(value, "sum-1")


@pytest.mark.parametrize("value", [None, "add 2 and 2", [], ["add"], user("add")])
def test_what_is_no_prompt_is_refused_and_names_the_task(value: object) -> None:
    with pytest.raises(TaskError, match=r"task 'sum-1': prompt\(\) gives .*; it must give messages, such as \[user"):
        as_prompt(value, "sum-1")


def test_messages_are_a_prompt() -> None:
    assert as_prompt((user("add"),), "t") == (user("add"),)
