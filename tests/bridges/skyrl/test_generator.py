"""The generator over a real collector, dispatcher and ledger, with scripted replies: order, several segments, failures."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from skyrl.train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output

from palestra import Finish, InfrastructureError, Message, Rewrite, Task, Trajectory, agent, dispatch, render, user
from palestra.backends.scripted import ScriptedSampler
from palestra.bridges.skyrl_train.account import Account
from palestra.bridges.skyrl_train.generator import PalestraGenerator
from palestra.bridges.skyrl_train.handover import Rules
from palestra.collect import Collector
from palestra.config import BoundedDispatch
from palestra.errors import PalestraError, TaskError
from palestra.ledger import Ledger
from palestra.message import ToolCall, assistant
from palestra.policy import TokenPolicies
from palestra.rollout import Patience

FILLER = 3
OPEN = [0]
"""How many slow environments were open, as it went up and down."""


@dataclass(frozen=True)
class Errand(Task[None, str]):
    """Begins anew so many times, then hands in; what its name asks for goes wrong."""

    rewrites: int = 0
    breaks: str = ""

    async def setup(self, stack: AsyncExitStack) -> None:
        if self.breaks == "setup":
            raise InfrastructureError("no sandbox")
        if self.breaks == "slow":
            OPEN.append(OPEN[-1] + 1)
            await asyncio.sleep(0.05)
            OPEN.append(OPEN[-1] - 1)

    def prompt(self, env: None) -> Sequence[Message]:
        return [user(f"{self.id} 0")]

    def tools(self, env: None) -> Sequence[Callable[..., object]]:
        def again(count: int) -> Rewrite:
            """Begin anew."""
            return Rewrite([user(f"{self.id} {count}")])

        def finish(answer: str) -> Finish:
            """Hand in."""
            return Finish(answer)

        return [again, finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        if self.breaks == "score":
            raise TaskError("a task that breaks its contract")
        return float(trajectory.index % 2)


ERRANDS = {
    task.id: task
    for task in (Errand("plain"), Errand("anew", 2), Errand("broken", breaks="setup"), Errand("slow", breaks="slow"))
}


def _reply(said: str) -> Message:
    name, count = said.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0].split()
    if int(count) < ERRANDS[name].rewrites:
        return assistant("", ToolCall("", "again", {"count": int(count) + 1}))
    return assistant("", ToolCall("", "finish", {"answer": name}))


def _generator(model: Path, folder: Path, tasks: Sequence[Errand], patience: int = 100) -> PalestraGenerator:
    ledger = Ledger.open(folder / "ledger.sqlite")
    renderer = render.load(model)
    account = Account(ledger, patience)
    collector = Collector(
        TokenPolicies(ScriptedSampler(_reply, renderer), renderer),
        lambda: dispatch.make(BoundedDispatch(kind="bounded", slots=3)),
        ledger,
        agent.Limits(8, 60.0),
        context=1000,
        seed=0,
        cache=folder,
        patience=Patience(retries=1, backoff=0.0),
        on_trajectory=account.heard_of,
    )
    return PalestraGenerator(tasks, collector, Rules("grpo", 2, frozenset()), account, FILLER)


def _input(names: Sequence[str], samples: int = 4, step: int = 1, phase: Any = "train") -> GeneratorInput:
    ids = [TrajectoryID(name, index) for name in names for index in range(samples)]
    return GeneratorInput(
        prompts=[[] for _ in ids],
        env_classes=["" for _ in ids],
        env_extras=[{} for _ in ids],
        sampling_params={"temperature": 1.0, "max_tokens": 100},
        trajectory_ids=ids,
        batch_metadata=BatchMetadata(step, phase),
    )


async def test_outputs_come_in_the_order_asked_with_a_row_for_each_segment(model: Path, tmp_path: Path) -> None:
    generator = _generator(model, tmp_path, list(ERRANDS.values()))
    async with generator.serving():
        output = await generator.generate(_input(["slow", "anew", "broken", "plain"]))
    validate_generator_output(16, output, step_wise=True)
    shown = [(one.instance_id, one.repetition_id) for one in output["trajectory_ids"]]
    expected = [
        (name, i) for name, rows in (("slow", 1), ("anew", 3), ("broken", 1), ("plain", 1)) for i in range(4) for _ in range(rows)
    ]
    assert shown == expected
    assert [last for (name, _), last in zip(shown, output["is_last_step"], strict=True) if name == "anew"] == [
        False,
        False,
        True,
    ] * 4
    assert output["rollout_metrics"]["palestra/failed"] == 4


async def test_a_rollout_that_failed_for_good_goes_back_with_a_mask_of_zeros(model: Path, tmp_path: Path) -> None:
    generator = _generator(model, tmp_path, list(ERRANDS.values()))
    async with generator.serving():
        output = await generator.generate(_input(["broken", "plain"], samples=2))
    assert output["loss_masks"][:2] == [[0], [0]]
    assert output["response_ids"][:2] == [[FILLER], [FILLER]]
    assert all(math.isnan(reward) for reward in output["rewards"][:2])
    assert output["rewards"][2:] == [0.0, 1.0]
    assert all(any(mask) for mask in output["loss_masks"][2:])


async def test_everything_is_in_the_ledger_and_recalled_from_it(model: Path, tmp_path: Path) -> None:
    generator = _generator(model, tmp_path, list(ERRANDS.values()))
    async with generator.serving():
        first = await generator.generate(_input(["plain", "anew"]))
        rows = list(generator._collector.ledger.trajectories())
        again = await generator.generate(_input(["plain", "anew"]))
        assert len(list(generator._collector.ledger.trajectories())) == len(rows) == 8
    assert [row.key.step for row in rows] == [0] * 8
    assert first["response_ids"] == again["response_ids"]


async def test_calls_side_by_side_share_one_dispatcher(model: Path, tmp_path: Path) -> None:
    tasks = [Errand(f"slow{number}", breaks="slow") for number in range(3)]
    ERRANDS.update((task.id, task) for task in tasks)
    generator = _generator(model, tmp_path, tasks)
    async with generator.serving():
        outputs = await asyncio.gather(*(generator.generate(_input([task.id], samples=2)) for task in tasks))
    assert max(OPEN) == 3  # six attempts at once would be six, without the three slots that all share
    assert [output["trajectory_ids"][0].instance_id for output in outputs] == [task.id for task in tasks]


async def test_what_the_user_has_to_mend_ends_the_run(model: Path, tmp_path: Path) -> None:
    task = Errand("wrong", breaks="score")
    ERRANDS[task.id] = task
    generator = _generator(model, tmp_path, [task])
    with pytest.raises(TaskError, match="breaks its contract"):
        async with generator.serving():
            await generator.generate(_input(["wrong"]))


async def test_a_run_in_which_everything_fails_ends_with_the_reason(model: Path, tmp_path: Path) -> None:
    generator = _generator(model, tmp_path, list(ERRANDS.values()), patience=6)
    with pytest.raises(PalestraError, match=r"the last 6 rollouts all failed; the last one: init failed.*no sandbox"):
        async with generator.serving():
            await generator.generate(_input(["broken"], samples=8))
