"""The training loop, from data set to gradient: evaluate, then step by step collect groups, give credit, update, publish.

A step is durable when its checkpoint is written and the ledger has committed it, in that order. A run that was killed goes on
from there: what was sampled since is in the ledger, and is trained on once.
"""

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra import agent, checkpoint, dispatch, taskset
from palestra.advantage import Credit, credit
from palestra.backends.opening import Opened, open_backend
from palestra.collect import AnyTask, Collector
from palestra.config import Config, Training
from palestra.errors import ConfigError, PalestraError, StorageError, cause
from palestra.evaluation import Result, evaluate
from palestra.ledger import Key, Ledger, Phase, StepRecord
from palestra.protocols import Sampling, Trainer
from palestra.report import Reporter
from palestra.rollout import describe
from palestra.runs import RunFolder
from palestra.trajectory import Group, Trajectory
from palestra.warm_start import warm_start


async def train(
    config: Config, run: RunFolder, reporter: Reporter, stopping: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Train, or go on training, and return the summary that is also written to the run's folder."""
    if config.training is None:
        raise ConfigError("the section [training] is missing; `palestra eval` needs none")
    tasks, heldout = taskset.load(config.tasks, "train"), _heldout(config)
    _refuse_overlap(tasks, heldout)
    if config.training.groups > len(tasks):
        raise ConfigError(f"training.groups = {config.training.groups} is more than the {len(tasks)} tasks of tasks.train")
    # The ledger comes last: where the backend cannot be opened, no run has begun.
    async with open_backend(config, training=True) as backend:
        if backend.trainer is None:
            raise ConfigError(f'backend.kind = {config.backend.kind!r} cannot train; use "torch"')
        with Ledger.open(run.ledger) as ledger:
            collector = make_collector(config, backend, ledger, run)
            collector.stopping, collector.on_trajectory = stopping, reporter.trajectory
            return await _Training(
                config, config.training, run, reporter, ledger, backend.trainer, collector, tasks, heldout
            ).run()


async def evaluate_only(config: Config, run: RunFolder, reporter: Reporter) -> Result:
    """Evaluate without training: pass@1 and, with several attempts at a task, pass@k."""
    heldout, samples = _heldout(config), config.evaluation.samples
    with Ledger.open(run.ledger) as ledger:
        async with open_backend(config, training=False) as backend:
            collector = make_collector(config, backend, ledger, run)
            collector.on_trajectory = reporter.trajectory
            reporter.begin_evaluation(0, len(heldout) * samples)
            result = await evaluate(collector, heldout, samples, 0, sampling_of(config))
            reporter.end_evaluation(0, "sampled" if config.sampling.temperature else "greedy", result)
            run.write_summary(result.to_json())
            return result


def make_collector(config: Config, backend: Opened, ledger: Ledger, run: RunFolder) -> Collector:
    return Collector(
        sampler=backend.sampler,
        renderer=backend.renderer,
        dispatcher=dispatch.make(config.dispatch),
        ledger=ledger,
        limits=agent.Limits(config.agent.turns, config.agent.seconds),
        context=config.agent.context,
        seed=config.run.seed,
        cache=run.cache,
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
            await warm_start(self.config.warm_start, self.trainer, self.collector.renderer, self.reporter, heldout)
        base = await self._evaluate(0, greedy=self.config.evaluation.greedy)
        every = self.config.evaluation.every
        for step in range(self.done, self.plan.steps):
            if every and step and step % every == 0:
                await self._evaluate(step)
            await self._step(step)
        final = await self._evaluate(self.plan.steps, greedy=self.config.evaluation.greedy)
        adapter = self.run_folder.path / "adapter"
        await self.trainer.export(adapter)
        return self._summarise(base, final, str(adapter), time.monotonic() - started)

    async def _restore(self) -> None:
        """Load the newest checkpoint that ledger and disk agree on, and recall which policy was best."""
        checkpoint.sweep(self.run_folder.checkpoints)
        name = self.ledger.checkpoint()
        if name is None:
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
        for row in self.run_folder.read_metrics():
            if row.get("evaluation") == "sampled" and row["pass@1"]["value"] > self.best[0]:
                self.best = (row["pass@1"]["value"], row["step"])

    async def _step(self, step: int) -> None:
        """Collect, give credit, update, publish, save."""
        self.reporter.begin_step(step, self.plan.steps, self.plan.groups * self.plan.samples)
        started = time.monotonic()
        batch = taskset.batch(self.tasks, step, self.plan.groups, self.config.run.seed)
        groups: list[Group] = []
        credits: list[Credit] = []
        async with self.collector.groups(batch, self.plan.samples, step, sampling_of(self.config)) as stream:
            async for group in stream:
                groups.append(group)
                if not self.plan.shuffle_rewards:
                    credits.append(await self._learn_from(group))
        if len(groups) < len(batch):
            await self.trainer.discard()
            raise _Stopped
        if self.plan.shuffle_rewards:
            credits = [
                await self._learn_from(group) for group in _shuffled(groups, random.Random(f"{self.config.run.seed}/{step}"))
            ]
        _refuse_total_failure(groups, step)
        collected = time.monotonic()
        learned: dict[str, float] = {}
        if any(outcome.samples for outcome in credits):
            learned = dict(await self.trainer.step(self._learning_rate(step)))
            await self.trainer.publish()
        metrics = {
            **_describe(groups, credits),
            **learned,
            "seconds": time.monotonic() - started,
            "rollout_seconds": collected - started,
        }
        self.uncommitted.append(_record(step, metrics, groups, credits))
        self.done = step + 1
        if (step + 1) % self.plan.save_every == 0 or step + 1 == self.plan.steps:
            await self._save()
        self.run_folder.append_metrics({"step": step, **metrics})
        self.reporter.end_step(step, metrics)

    async def _learn_from(self, group: Group) -> Credit:
        outcome = credit(
            group,
            self.plan.estimator,
            min_group=self.plan.min_group,
            masked_stops=self.plan.masked_stops,
            segment_weight=self.plan.segment_weight,
        )
        if outcome.samples:
            await self.trainer.accumulate(outcome.samples, self.config.loss)
        return outcome

    def _learning_rate(self, step: int) -> float:
        warmup = self.plan.warmup_steps
        return self.plan.learning_rate * (min(1.0, (step + 1) / warmup) if warmup else 1.0)

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
        settings, sampling = self.config.evaluation, sampling_of(self.config)
        kinds: dict[str, tuple[int, Sampling, Phase]] = {"sampled": (settings.samples, sampling, "eval")}
        if greedy:
            kinds["greedy"] = (1, dataclasses.replace(sampling, temperature=0.0), "greedy")
        self.reporter.begin_evaluation(step, len(self.heldout) * sum(samples for samples, _, _ in kinds.values()))
        # Side by side: what one leaves of the sampler towards its end, the other one uses.
        try:
            async with asyncio.TaskGroup() as both:
                running = {
                    name: both.create_task(evaluate(self.collector, self.heldout, samples, step, how, phase))
                    for name, (samples, how, phase) in kinds.items()
                }
        except BaseExceptionGroup as errors:
            raise cause(errors) from None
        results = {name: task.result() for name, task in running.items()}
        if self.collector.stopping():
            raise _Stopped  # some attempts may be missing; those that are done count when the run goes on
        success = results["sampled"].success.value
        if success > self.best[0]:
            self.best = (success, step)
            await self.trainer.export(self.run_folder.path / "best")
        for name, result in results.items():
            self.run_folder.append_metrics({"step": step, "evaluation": name, **result.to_json()})
            self.reporter.end_evaluation(step, name, result)
        return results

    async def _stop_early(self) -> dict[str, Any]:
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


def sampling_of(config: Config) -> Sampling:
    return Sampling(config.sampling.temperature, config.sampling.max_tokens)


def _heldout(config: Config) -> list[AnyTask]:
    return taskset.load(config.tasks, "heldout")[: config.evaluation.tasks]


def _refuse_overlap(tasks: Sequence[AnyTask], heldout: Sequence[AnyTask]) -> None:
    both = {task.id for task in tasks} & {task.id for task in heldout}
    if both:
        raise ConfigError(f"task {min(both)!r} is in tasks.train and in tasks.heldout; what is evaluated must not be trained on")


def _refuse_total_failure(groups: Sequence[Group], step: int) -> None:
    """A step in which nothing succeeded in running at all would go on failing, quietly and for ever."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if len(failures) == len(trajectories):
        raise PalestraError(f"every rollout of step {step} failed; the first: {describe(failures[0])}")


def _shuffled(groups: Sequence[Group], chance: random.Random) -> list[Group]:
    """The control: the step's own rewards, dealt out at random."""
    done = [t for group in groups for t in group.trajectories if t.reward is not None]
    rewards = [t.reward for t in done]
    chance.shuffle(rewards)
    dealt = {id(t): reward for t, reward in zip(done, rewards, strict=True)}
    return [Group(g.task_id, tuple(_with_reward(t, dealt.get(id(t))) for t in g.trajectories)) for g in groups]


def _with_reward(trajectory: Trajectory, reward: float | None) -> Trajectory:
    return dataclasses.replace(trajectory, reward=reward)


def _describe(groups: Sequence[Group], credits: Sequence[Credit]) -> dict[str, float]:
    trajectories = [t for group in groups for t in group.trajectories]
    done = [t for t in trajectories if t.reward is not None]
    outcomes = Counter(outcome.outcome for outcome in credits)
    count = max(1, len(done))
    return {
        "reward": sum(t.reward or 0.0 for t in done) / count,
        "turns": sum(len(t.turns) for t in done) / count,
        "sampled_tokens": sum(t.sampled_tokens for t in done),
        "failed": len(trajectories) - len(done),
        "groups_trained": outcomes["trained"],
        "groups_without_spread": outcomes["no_spread"],
        "groups_too_small": outcomes["too_small"],
    }


def _record(step: int, metrics: dict[str, float], groups: Sequence[Group], credits: Sequence[Credit]) -> StepRecord:
    """Which trajectories the step trained on, and which gave no gradient."""
    trained: list[Key] = []
    filtered: list[Key] = []
    for group, outcome in zip(groups, credits, strict=True):
        for trajectory in group.trajectories:
            if trajectory.failure is None:
                keys = trained if outcome.outcome == "trained" else filtered
                keys.append(Key("train", step, group.task_id, trajectory.index))
    return StepRecord(step, metrics, trained, filtered)
