"""SkyRL's own trainer over groups of ours, up to the point where its losses read what it has made of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.utils.trainer_utils import validate_generator_output

from palestra.bridges.skyrl_train.account import Account, Handed, describe
from palestra.bridges.skyrl_train.generator import _output
from palestra.bridges.skyrl_train.handover import Rules, hand_over
from palestra.bridges.skyrl_train.settings import skyrl_config
from palestra.bridges.skyrl_train.trainers import SyncTrainer
from palestra.config import Config, parse
from palestra.ledger import Ledger
from palestra.runs import RunFolder
from palestra.trajectory import Group, Key


def with_training(config: Config, loss: dict[str, Any], **training: Any) -> Config:
    """For steps of six groups."""
    values = config.model_dump(mode="json", exclude_none=True)
    return parse(values | {"loss": loss, "training": values["training"] | {"groups": 6} | training})


def skyrl_trainer(config: Config, tmp_path: Path) -> SyncTrainer:
    assert config.training is not None
    run = RunFolder(tmp_path)
    cfg = skyrl_config(config, config.backend, config.training, run, model=Path(config.backend.model), tasks=6, on_cpu=True)
    trainer = SyncTrainer(cfg, None, SimpleNamespace(pad_token_id=0), None, None, None)
    trainer.account = Account(Ledger.open(tmp_path / "ledger.sqlite"), patience=100)
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    trainer.global_step = 1
    return trainer


def _handed_over(trainer: SyncTrainer, config: Config, given: list[Group]) -> tuple[GeneratorOutput, list[str]]:
    assert config.training is not None
    plan = config.training
    rules = Rules(plan.estimator, plan.min_group, frozenset(plan.masked_stops))
    rows, handed = [], []
    for group in given:
        made, outcome = hand_over(group, rules, filler=7)
        rows.extend((group.task_id, row) for row in made)
        handed.append(Handed([Key("train", 0, group.task_id, t.index) for t in group.trajectories], group.trajectories, outcome))
    trainer.account.handed_over(handed)
    output = _output(rows, describe(handed))
    validate_generator_output(sum(len(group.trajectories) for group in given), output, step_wise=True)
    return output, [one.instance_id for one in output["trajectory_ids"]]


def training_input(trainer: SyncTrainer, config: Config, given: list[Group]) -> Any:
    """What SkyRL's own code makes of our rows, up to the advantages that its losses read."""
    output, uids = _handed_over(trainer, config, given)
    output.pop("rollout_metrics")
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data["values"] = None
    return trainer.compute_advantages_and_returns(data)


def trained_rows(data: Any) -> list[int]:
    return [row for row in range(len(data["loss_mask"])) if data["loss_mask"][row].any()]
