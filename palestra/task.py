"""A task: one row of a data set, as a frozen dataclass that knows how to set the scene, and how to judge what came out."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from palestra.errors import TaskError
from palestra.message import JSON, Message
from palestra.tool import AnyTool
from palestra.trajectory import Trajectory

Env = TypeVar("Env")
Artifact = TypeVar("Artifact")


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with figures beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(Generic[Env, Artifact]):
    """Subclass it as a frozen dataclass. `id` names the task; two tasks of one set never share it."""

    id: str

    _asynchronous: ClassVar[tuple[str, ...]] = ("prepare", "setup", "harvest", "score", "solve")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls._asynchronous:
            method = getattr(cls, name)
            if inspect.isfunction(method) and not inspect.iscoroutinefunction(method):
                raise TaskError(f"{cls.__name__}.{name} must be asynchronous; write `async def {name}`")

    async def prepare(self, cache: Path) -> None:
        """Once per task, before its first rollout: snapshots, indices, data."""

    async def setup(self, stack: AsyncExitStack) -> Env:
        """Open what one rollout needs. What is entered on the stack is closed, come what may, and in whole even when the
        rollout is cancelled meanwhile; for that it may be closed by another asyncio task than the one that opened it."""
        return None  # type: ignore[return-value]  # a task without an environment

    def prompt(self, env: Env) -> Sequence[Message]:
        """The messages that begin the run."""
        raise NotImplementedError(f"{type(self).__name__} has no prompt()")

    def tools(self, env: Env) -> Sequence[Callable[..., object] | AnyTool]:
        """The functions that the agent may call."""
        raise NotImplementedError(f"{type(self).__name__} has no tools()")

    async def harvest(self, env: Env, trajectory: Trajectory) -> Artifact:
        """Take out what will be graded, as JSON: a diff, an answer, files. The environment is closed afterwards."""
        return trajectory.answer  # type: ignore[no-any-return]

    async def score(self, artifact: Artifact, trajectory: Trajectory, stack: AsyncExitStack) -> float | Score:
        """Judge the artifact, in a fresh runtime (opened on the stack) where one is needed."""
        raise NotImplementedError(f"{type(self).__name__} has no score()")

    async def solve(self, env: Env) -> JSON:
        """The gold solution: change the environment, or return the answer. `palestra check` proves that it scores 1."""
        raise NotImplementedError(f"{type(self).__name__} has no solve(), so its gold solution cannot be checked")


AnyTask = Task[Any, Any]


def as_prompt(value: object, task_id: str) -> Sequence[Message]:
    """What `prompt` returned, checked."""
    if not isinstance(value, Sequence) or not value or not all(isinstance(message, Message) for message in value):
        raise TaskError(f'task {task_id!r}: prompt() gives {value!r:.80}; it must give messages, such as [user("…")]')
    return value


def as_score(value: object, task_id: str) -> Score:
    """What `score` returned, checked: a finite number, alone or in a `Score`."""
    score = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]  # checked on the next line
    number = score.reward
    if not isinstance(number, Real) or not math.isfinite(number):
        raise TaskError(f"task {task_id!r}: score() returned {number!r}; it must return a finite number or a Score")
    return Score(float(number), score.metrics)
