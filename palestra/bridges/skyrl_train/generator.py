"""What SkyRL asks for rollouts: its `GeneratorInterface` over our collector. One dispatcher runs the rollouts of all calls, and
every trajectory is in the ledger before SkyRL sees it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID

from palestra.bridges.skyrl_train.account import Account, Handed, describe
from palestra.bridges.skyrl_train.handover import Row, Rules, hand_over
from palestra.collect import Ask, Collector
from palestra.protocols import Sampling
from palestra.task import AnyTask
from palestra.trajectory import Group, Key


class TaskDataset:
    """A task set as SkyRL's data loaders take it: every row is a task's id."""

    def __init__(self, tasks: Sequence[AnyTask]) -> None:
        self._ids = [task.id for task in tasks]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> dict[str, Any]:
        name = self._ids[place]
        return {"prompt": [{"role": "user", "content": name}], "env_class": None, "env_extras": {}, "uid": name}

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return rows


class PalestraGenerator(GeneratorInterface):
    def __init__(self, tasks: Sequence[AnyTask], collector: Collector, rules: Rules, account: Account, filler: int) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._collector, self._rules, self._account, self._filler = collector, rules, account, filler
        self._ask: Ask | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Only in here can SkyRL ask for rollouts."""
        async with self._collector.requests() as self._ask:
            yield

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        if self._ask is None:
            raise RuntimeError("the generator is not serving")
        ids, about = input_batch["trajectory_ids"], input_batch["batch_metadata"]
        # SkyRL counts the step it works on from 1, Palestra from 0; an evaluation after n steps has the number n in both.
        training = about.training_phase == "train"
        keys = [
            Key("train", about.global_step - 1, one.instance_id, one.repetition_id)
            if training
            else Key("eval", about.global_step or 0, one.instance_id, one.repetition_id)
            for one in ids
        ]
        how = input_batch["sampling_params"]
        sampling = Sampling(how["temperature"], how["max_tokens"])
        trajectories = await self._ask([(self._tasks[key.task_id], key) for key in keys], sampling)
        rows: list[tuple[str, Row]] = []
        handed: list[Handed] = []
        for task_id, members in groupby(zip(keys, trajectories, strict=True), key=lambda member: member[0].task_id):
            group_keys, attempts = zip(*members, strict=True)
            made, credit = hand_over(Group(task_id, attempts), self._rules, self._filler)
            rows.extend((task_id, row) for row in made)
            handed.append(Handed(group_keys, attempts, credit))
        if training:
            self._account.handed_over(handed)
        return _output(rows, describe(handed))


def _output(rows: Sequence[tuple[str, Row]], metrics: Mapping[str, float]) -> GeneratorOutput:
    # Where SkyRL joins several outputs it adds such figures up, unless their name says that they are means.
    names = {name: f"palestra/{name}_mean" if name in ("reward", "turns") else f"palestra/{name}" for name in metrics}
    return GeneratorOutput(
        prompt_token_ids=[row.prompt for _, row in rows],
        response_ids=[row.response for _, row in rows],
        rewards=[row.reward for _, row in rows],
        loss_masks=[row.mask for _, row in rows],
        stop_reasons=[row.stop for _, row in rows],
        rollout_metrics={names[name]: value for name, value in metrics.items()},
        rollout_logprobs=[row.logprobs for _, row in rows],
        trajectory_ids=[TrajectoryID(task_id, row.index) for task_id, row in rows],
        is_last_step=[row.is_last for _, row in rows],
    )
