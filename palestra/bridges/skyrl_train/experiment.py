"""The experiment: SkyRL's `BasePPOExp` with our data, generator and trainers; and what it prints goes to the run's own records.

With a GPU SkyRL's workers and engines do the work. Without one, and only then, `cpu_workers.py` and `cpu_engine.py` stand in
their place.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp

from palestra import render
from palestra.backends.opening import Opened
from palestra.backends.torch import model as models
from palestra.backends.torch.sampler import TorchSampler
from palestra.bridges.skyrl_train.account import Account
from palestra.bridges.skyrl_train.cpu_engine import CpuEngine
from palestra.bridges.skyrl_train.cpu_workers import CpuWorkers
from palestra.bridges.skyrl_train.generator import PalestraGenerator, TaskDataset
from palestra.bridges.skyrl_train.handover import Rules
from palestra.bridges.skyrl_train.sampler import EngineSampler
from palestra.bridges.skyrl_train.trainers import AsyncTrainer, SyncTrainer
from palestra.collect import Collector
from palestra.config import Config, Skyrl, Training
from palestra.evaluation import evaluate_both
from palestra.ledger import Ledger
from palestra.policy import TokenPolicies
from palestra.protocols import Capacity
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.task import AnyTask
from palestra.training import make_collector, record_evaluation, sampling_of
from palestra.trajectory import Trajectory


@dataclass
class Job:
    """What a run of ours is about."""

    config: Config
    section: Skyrl
    plan: Training
    tasks: list[AnyTask]
    heldout: list[AnyTask]
    run: RunFolder
    reporter: Reporter
    ledger: Ledger
    model: Path

    def begin_step(self, step: int) -> None:
        if step < self.plan.steps:
            self.reporter.begin_step(step, self.plan.steps, self.plan.groups * self.plan.samples)


class Tracker:
    """Where SkyRL logs: the figures of a step go to the run's metrics and to whoever looks on."""

    def __init__(self, job: Job, account: Account) -> None:
        self._job, self._account = job, account
        self._figures: dict[str, float] = {}

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        self._figures.update((name, float(value)) for name, value in data.items() if _is_figure(value))
        if not commit:
            return
        figures, self._figures = self._figures, {}
        measured = self._account.ended(step - 1)
        if measured is not None:
            theirs = {f"skyrl/{name}": value for name, value in figures.items() if not name.startswith("palestra/")}
            self._job.run.append_metrics({"step": step - 1, **measured, **theirs})
            self._job.reporter.end_step(step - 1, measured)
        self._job.begin_step(step)

    def log_exception(self, error: BaseException, step: int = 0) -> None:
        """It is told to the user where the run ends."""

    def finish(self) -> None: ...


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Experiment(BasePPOExp):
    def __init__(self, cfg: SkyRLTrainConfig, job: Job) -> None:
        self.job = job
        self.account = Account(job.ledger, patience=job.plan.groups * job.plan.samples, ahead=job.plan.staleness > 0)
        self.generator: PalestraGenerator
        super().__init__(cfg)

    def get_train_dataset(self) -> TaskDataset:
        return TaskDataset(self.job.tasks)

    def get_eval_dataset(self) -> None:
        """Held-out tasks are evaluated by Palestra itself, sampled and greedy."""

    def get_tracker(self) -> Tracker:
        return Tracker(self.job, self.account)

    def get_generator(self, cfg: SkyRLTrainConfig, tokenizer: Any, inference_engine_client: Any) -> PalestraGenerator:
        job = self.job
        self.sampler = EngineSampler(
            inference_engine_client,
            model=resolve_policy_model_name(cfg),
            vocabulary=max(len(tokenizer), _vocabulary(job.model)),
            seconds=job.section.seconds,
            capacity=self.capacity(),
        )
        renderer = render.load(job.model, job.section.renderer, job.section.thinking)
        opened = Opened(TokenPolicies(self.sampler, renderer), renderer, None)
        self.collector: Collector = make_collector(job.config, opened, job.ledger, job.run)
        self.collector.on_trajectory = self._heard_of
        rules = Rules(job.plan.estimator, job.plan.min_group, frozenset(job.plan.masked_stops))
        self.generator = PalestraGenerator(job.tasks, self.collector, rules, self.account, tokenizer.pad_token_id)
        return self.generator

    def capacity(self) -> Capacity | None:
        """What the engines can hold; SkyRL's do not say."""
        return None

    def _heard_of(self, trajectory: Trajectory) -> None:
        self.job.reporter.trajectory(trajectory)
        self.account.heard_of(trajectory)

    def get_trainer(self, **given: Any) -> SyncTrainer | AsyncTrainer:
        trainer = (AsyncTrainer if self.job.plan.staleness else SyncTrainer)(**given)
        trainer.account, trainer.evaluate, trainer.resumed = self.account, self.evaluate, self.resumed
        return trainer

    def resumed(self, done: int, checkpoint: Path | None) -> None:
        """SkyRL goes on with weights that have so many steps behind them."""
        self.account.go_on_from(done, checkpoint)
        self.sampler.resumed = done
        self.job.run.keep_metrics(done)
        self.job.begin_step(done)

    async def evaluate(self, step: int) -> dict[str, float]:
        """On held-out tasks; before and after training greedily too."""
        job, settings = self.job, self.job.config.evaluation
        greedy = settings.greedy and step in (0, job.plan.steps)
        job.reporter.begin_evaluation(step, len(job.heldout) * (settings.samples + greedy))
        began = time.monotonic()
        results = await evaluate_both(self.collector, job.heldout, settings.samples, step, sampling_of(job.config), greedy)
        self.account.leave_out(time.monotonic() - began)
        record_evaluation(job.run, job.reporter, step, results)
        return {f"eval/{name}": result.success.value for name, result in results.items()}

    def close(self) -> None:
        """SkyRL's servers end with the process that began them."""


class CpuExperiment(Experiment):
    """Without a GPU: everything in this process, and no Ray."""

    _torch_sampler: TorchSampler | None = None

    def capacity(self) -> Capacity:
        return Capacity(self.job.section.kv_tokens)

    def get_inference_client(self) -> CpuEngine:
        section = self.job.section
        if section.threads:
            torch.set_num_threads(section.threads)
        models.keep_freed_memory()
        loaded = models.load(self.job.model, getattr(torch, section.dtype), torch.device("cpu"))
        self._torch_sampler = TorchSampler(loaded, section.kv_tokens)
        self._torch_sampler.start()
        return CpuEngine(self._torch_sampler, str(self.job.model))

    def _setup_trainer(self) -> SyncTrainer | AsyncTrainer:
        """As SkyRL's own, with the workers replaced."""
        engine = self.get_inference_client()
        self.trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=self.get_tracker(),
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=engine,
            generator=self.get_generator(self.cfg, self.tokenizer, engine),
            colocate_pg=None,
        )
        self.trainer.dispatch = CpuWorkers(self.cfg, engine)
        return self.trainer

    def close(self) -> None:
        if self._torch_sampler is not None:
            self._torch_sampler.close()


def _vocabulary(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
