"""Our tasks as verl's data sets. A row says which attempt is asked for; its prompt is the agent's business.

The training set is the run's whole plan, step after step in our own order, so verl reads it through once and shuffles nothing.
The held-out tasks come once for each kind of evaluation, under a data source of its own.
"""

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from palestra import taskset
from palestra.bridges.verl.scene import CONFIG
from palestra.config import Config, load
from palestra.trajectory import Phase

LOOP = "palestra"
"""The name of our agent loop, as in `agent_loop.yaml`."""


class TaskRows(Dataset[dict[str, Any]]):
    """`data_files` is the key of the task set, "train" or "heldout"; verl gives the rest."""

    def __init__(self, data_files: str, config: Any, **_: object) -> None:
        ours = load(Path(config[CONFIG]))
        self._rows = _training_rows(ours) if data_files == "train" else _heldout_rows(ours)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return dict(self._rows[place])


def _training_rows(config: Config) -> list[dict[str, Any]]:
    plan = config.training
    assert plan is not None
    tasks = taskset.load(config.tasks, "train")
    batches = (taskset.batch(tasks, step, plan.groups, config.run.seed) for step in range(plan.steps))
    return [_row(task.id, "train", step, plan.samples) for step, batch in enumerate(batches) for task in batch]


def _heldout_rows(config: Config) -> list[dict[str, Any]]:
    settings = config.evaluation
    tasks = taskset.load(config.tasks, "heldout")[: settings.tasks]
    kinds: dict[Phase, int] = {"eval": settings.samples}
    if settings.greedy:
        kinds["greedy"] = 1
    return [_row(task.id, phase, 0, samples) for phase, samples in kinds.items() for task in tasks]


def _row(task_id: str, phase: Phase, step: int, attempts: int) -> dict[str, Any]:
    return {
        "agent_name": LOOP,
        "data_source": phase,
        "index": step,
        "raw_prompt": [{"role": "user", "content": task_id}],  # verl counts its prompts by this
        "reward_model": {"ground_truth": None},
        "palestra_phase": phase,
        "palestra_step": step,
        "palestra_task": task_id,
        "__rollout_n__": attempts,
    }
