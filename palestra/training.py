"""The training loop, from data set to gradient: evaluate, then step by step collect groups, give credit, update, publish.

A step is durable when its checkpoint is written and the ledger has committed it, in that order. A run that was killed goes on
from there: what was sampled since is in the ledger, and is trained on once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from palestra import agent, checkpoint, dispatch, hints, taskset
from palestra.backends.opening import Opened, open_backend
from palestra.collect import Collector
from palestra.config import Config, Training
from palestra.errors import BackendError, ConfigError, StorageError
from palestra.evaluation import Result, evaluate, evaluate_both
from palestra.gather import learn
from palestra.learner import StepLearner
from palestra.ledger import Ledger, StepRecord
from palestra.pace import Pace
from palestra.protocols import Renderer, Sampling, Trainer
from palestra.report import Reporter
from palestra.rollout import Patience
from palestra.runs import RunFolder
from palestra.task import AnyTask
from palestra.tools.mcp import open_tools
from palestra.warm_start import warm_start


async def train(
    config: Config, run: RunFolder, reporter: Reporter, stopping: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Train, or go on training, and return the summary that is also written to the run's folder."""
    if config.training is None:
        raise ConfigError("the section [training] is missing; `palestra eval` needs none")
    tasks, heldout = task_sets(config, config.training)
    # The ledger comes last: where the backend cannot be opened, no run has begun.
    async with open_backend(config, training=True) as backend:
        if backend.trainer is None or backend.renderer is None:
            raise ConfigError(f'backend.kind = {config.backend.kind!r} cannot train; use "torch"')
        with Ledger.open(run.ledger) as ledger:
            collector = make_collector(config, backend, ledger, run)
            collector.stopping, collector.on_trajectory = stopping, reporter.trajectory
            with _resumable(f"palestra train --resume {run.path}"):
                return await _Training(
                    config, config.training, run, reporter, ledger, backend.trainer, backend.renderer, collector, tasks, heldout
                ).run()


async def evaluate_only(config: Config, run: RunFolder, reporter: Reporter) -> Result:
    """Evaluate without training: pass@1 and, with several attempts at a task, pass@k. In a folder that holds part of it, what is
    missing or failed is done."""
    heldout, samples = _heldout(config), config.evaluation.samples
    with Ledger.open(run.ledger) as ledger:
        async with open_backend(config, training=False) as backend:
            collector = make_collector(config, backend, ledger, run)
            collector.on_trajectory = reporter.trajectory
            reporter.begin_evaluation(0, len(heldout) * samples)
            with _resumable(f"palestra eval --resume {run.path}"):
                result = await evaluate(collector, heldout, samples, 0, sampling_of(config), again=True)
            reporter.end_evaluation(0, "sampled" if config.sampling.temperature else "greedy", result)
            run.write_summary(result.to_json())
            return result


@contextmanager
def _resumable(command: str) -> Iterator[None]:
    """Say how to go on when the server comes back."""
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{error}; what was done is kept, go on with: {command}") from None


def make_collector(config: Config, backend: Opened, ledger: Ledger, run: RunFolder) -> Collector:
    return Collector(
        policies=backend.policies,
        make_dispatcher=lambda: dispatch.make(config.dispatch, backend.policies.capacity),
        ledger=ledger,
        limits=agent.Limits.of(config.agent),
        context=config.agent.context,
        seed=config.run.seed,
        cache=run.cache,
        hints=hints.make(config.hints, config.agent.turns, config.agent.context, backend.renderer),
        open_tools=partial(open_tools, config.tools),
        patience=Patience(
            config.dispatch.init_seconds, config.dispatch.reward_seconds, config.dispatch.retries, config.dispatch.backoff
        ),
    )


class _Stopped(Exception):
    """The run was asked to stop before what it was doing was complete."""


@dataclass
class _Training:
    config: Config
    plan: Training
    run_folder: RunFolder
    reporter: Reporter
    ledger: Ledger
    trainer: Trainer
    renderer: Renderer
    collector: Collector
    tasks: Sequence[AnyTask]
    heldout: Sequence[AnyTask]
    uncommitted: list[StepRecord] = field(default_factory=list)
    done: int = 0
    """Steps that the weights at hand have behind them."""
    best: tuple[float, int] = (-1.0, -1)
    """The highest held-out success, and after how many steps."""

    async def run(self) -> dict[str, Any]:
        try:
            return await self._train()
        except _Stopped:
            return await self._stop_early()

    async def _train(self) -> dict[str, Any]:
        started = time.monotonic()
        await self._restore()
        if self.done == 0 and self.config.warm_start is not None:
            heldout = {task.id for task in self.heldout}
            await warm_start(self.config.warm_start, self.trainer, self.renderer, self.reporter, heldout)
        base = await self._evaluate(0, greedy=self.config.evaluation.greedy)
        if self.done < self.plan.steps:
            await self._learn()
        final = await self._evaluate(self.plan.steps, greedy=self.config.evaluation.greedy)
        adapter = self.run_folder.path / "adapter"
        await self.trainer.export(adapter)
        return self._summarise(base, final, str(adapter), time.monotonic() - started)

    async def _restore(self) -> None:
        """Load the newest checkpoint that ledger and disk agree on, and recall which policy was best."""
        checkpoint.sweep(self.run_folder.checkpoints)
        name = self.ledger.checkpoint()
        if name is None:
            self.run_folder.keep_metrics(0)
            return
        folder = self.run_folder.checkpoints / name
        if not checkpoint.valid(folder):
            older = checkpoint.newest_valid(self.run_folder.checkpoints)
            if older is None:
                raise StorageError(f"no checkpoint in {self.run_folder.checkpoints} is whole, so the run cannot go on")
            folder = older
            self.ledger.rewind(folder.name)
        await self.trainer.load(folder)
        self.done = self.ledger.committed_step() + 1
        self.run_folder.keep_metrics(self.done)
        for row in self.run_folder.read_metrics():
            if row.get("evaluation") == "sampled" and row["pass@1"]["value"] > self.best[0]:
                self.best = (row["pass@1"]["value"], row["step"])

    async def _learn(self) -> None:
        """The steps that are left."""
        plan, left = self.plan, self.plan.steps - self.done
        extra = round((plan.oversample - 1) * plan.groups)
        pace = Pace(plan.groups, left, staleness=plan.staleness, extra=extra, version=self.trainer.version)
        learner = StepLearner(
            plan, self.config.loss, self.trainer, pace, self.config.run.seed, self.done, self._end_step, self._begin_step
        )
        rounds = ((n, taskset.batch(self.tasks, n, plan.groups, self.config.run.seed)) for n in count())
        await self._evaluate_if_due()
        self._begin_step(self.done)
        async with self.collector.groups(rounds, plan.samples, pace, sampling_of(self.config)) as groups:
            if not await learn(groups, pace, learner, left, self.collector.stopping):
                raise _Stopped

    def _begin_step(self, step: int) -> None:
        self.reporter.begin_step(step, self.plan.steps, self.plan.groups * self.plan.samples)

    async def _end_step(self, record: StepRecord) -> None:
        """Save and report, and evaluate where that is due."""
        self.uncommitted.append(record)
        self.done = record.step + 1
        if self.done % self.plan.save_every == 0 or self.done == self.plan.steps:
            await self._save()
        self.run_folder.append_metrics({"step": record.step, **record.metrics})
        self.reporter.end_step(record.step, record.metrics)
        await self._evaluate_if_due()

    async def _evaluate_if_due(self) -> None:
        every = self.config.evaluation.every
        if every and 0 < self.done < self.plan.steps and self.done % every == 0:
            await self._evaluate(self.done)

    async def _save(self) -> None:
        if not self.uncommitted:
            return
        name = f"step-{self.uncommitted[-1].step + 1:05d}"
        await checkpoint.write(self.run_folder.checkpoints, name, self.trainer.save)
        self.ledger.commit_steps(self.uncommitted, name)
        self.uncommitted = []
        checkpoint.prune(self.run_folder.checkpoints, self.plan.keep_checkpoints, {name})

    async def _evaluate(self, step: int, greedy: bool = False) -> dict[str, Result]:
        """Evaluate after so many steps, and keep the best policy's weights."""
        settings = self.config.evaluation
        self.reporter.begin_evaluation(step, len(self.heldout) * (settings.samples + greedy))
        sampling = sampling_of(self.config)
        results = await evaluate_both(self.collector, self.heldout, settings.samples, step, sampling, greedy)
        if self.collector.stopping():
            raise _Stopped  # some attempts may be missing; those that are done count when the run goes on
        success = results["sampled"].success.value
        if success > self.best[0]:
            self.best = (success, step)
            await self.trainer.export(self.run_folder.path / "best")
        record_evaluation(self.run_folder, self.reporter, step, results)
        return results

    async def _stop_early(self) -> dict[str, Any]:
        await self.trainer.discard()
        await self._save()
        self.reporter.stopped(self.run_folder.path, self.done)
        return {"stopped": True, "steps": self.done}

    def _summarise(self, base: dict[str, Result], final: dict[str, Result], adapter: str, seconds: float) -> dict[str, Any]:
        summary = {
            "base": base["sampled"].success.value,
            "final": final["sampled"].success.value,
            "steps": self.plan.steps,
            "seconds": round(seconds, 1),
            "adapter": adapter,
            "best": {"success": self.best[0], "step": self.best[1], "adapter": str(self.run_folder.path / "best")},
            "evaluations": {
                when: {name: result.to_json() for name, result in results.items()}
                for when, results in (("base", base), ("final", final))
            },
            "trajectories": self.ledger.counts(),
        }
        self.run_folder.write_summary(summary)
        self.reporter.finished(self.run_folder, summary)
        return summary


def record_evaluation(run: RunFolder, reporter: Reporter, step: int, results: Mapping[str, Result]) -> None:
    known = {(row["step"], row.get("evaluation")) for row in run.read_metrics()}
    for name, result in results.items():
        if (step, name) not in known:  # a run that goes on finds what it evaluated before in the ledger
            run.append_metrics({"step": step, "evaluation": name, **result.to_json()})
        reporter.end_evaluation(step, name, result)


def sampling_of(config: Config) -> Sampling:
    return Sampling(config.sampling.temperature, config.sampling.max_tokens)


def task_sets(config: Config, plan: Training) -> tuple[list[AnyTask], list[AnyTask]]:
    """The tasks to train on and those to evaluate on, which no training may see."""
    tasks, heldout = taskset.load(config.tasks, "train"), _heldout(config)
    _refuse_overlap(tasks, heldout)
    if plan.groups > len(tasks):
        raise ConfigError(f"training.groups = {plan.groups} is more than the {len(tasks)} tasks of tasks.train")
    return tasks, heldout


def _heldout(config: Config) -> list[AnyTask]:
    return taskset.load(config.tasks, "heldout")[: config.evaluation.tasks]


def _refuse_overlap(tasks: Sequence[AnyTask], heldout: Sequence[AnyTask]) -> None:
    both = {task.id for task in tasks} & {task.id for task in heldout}
    if both:
        raise ConfigError(f"task {min(both)!r} is in tasks.train and in tasks.heldout; what is evaluated must not be trained on")
