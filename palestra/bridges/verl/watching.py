"""What people see of a verl run, and what its folder keeps: our ledger's news and verl's own metrics, turned into the same lines
and the same files as those of any other run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from palestra.advantage import credit
from palestra.bridges.verl.record import measured
from palestra.config import Config, Training
from palestra.errors import PalestraError
from palestra.evaluation import Result, summarise
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.trajectory import Group, Key, Phase, Trajectory

KINDS: dict[Phase, str] = {"eval": "sampled", "greedy": "greedy"}


class Source(Protocol):
    """Where the news come from."""

    def news(self) -> tuple[list[tuple[Key, Trajectory]], PalestraError | None]: ...

    def evaluation(self, phase: Phase, step: int) -> list[Trajectory]: ...


class Watch:
    def __init__(
        self, config: Config, plan: Training, run: RunFolder, reporter: Reporter, source: Source, log: Path, heldout: int
    ) -> None:
        self._config, self._plan, self._run, self._reporter, self._source = config, plan, run, reporter, source
        self._log, self._read = log, 0
        self._attempts = heldout * (config.evaluation.samples + config.evaluation.greedy)
        self._now: tuple[bool, int] | None = None
        self._steps: dict[int, list[Trajectory]] = {}
        self.results: dict[int, dict[str, Result]] = {}
        """Evaluations by the number of steps behind them."""

    def poll(self) -> PalestraError | None:
        """Report what is new, and say why the run is to end, if it is."""
        news, refusal = self._source.news()
        for key, trajectory in news:
            self._follow(key)
            self._reporter.trajectory(trajectory)
            if key.phase == "train":
                self._steps.setdefault(key.step, []).append(trajectory)
        for line in self._new_lines():
            self._take(line["step"], line["data"])
        return refusal

    def _follow(self, key: Key) -> None:
        """Tell the reporter when another step or evaluation begins."""
        now = (key.phase == "train", key.step)
        if now == self._now:
            return
        self._now = now
        if now[0]:
            self._reporter.begin_step(key.step, self._plan.steps, self._plan.groups * self._plan.samples)
        else:
            self._reporter.begin_evaluation(key.step, self._attempts)

    def _new_lines(self) -> list[dict[str, Any]]:
        """What verl has logged since, without a line that it is still writing."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, step: int, data: dict[str, float]) -> None:
        if "training/global_step" in data:
            figures = self._figures(self._steps.pop(step - 1, []), data)
            self._run.append_metrics({"step": step - 1, **figures})
            self._reporter.end_step(step - 1, figures)
        if any(name.startswith("val-") for name in data):
            self.results[step] = self.evaluate(step)

    def evaluate(self, step: int) -> dict[str, Result]:
        """The evaluation after so many steps, from the trajectories that were recorded."""
        known = {(row["step"], row.get("evaluation")) for row in self._run.read_metrics()}
        results = {}
        for phase, name in KINDS.items():
            if trajectories := self._source.evaluation(phase, step):
                samples = self._config.evaluation.samples if phase == "eval" else 1
                took = [when for t in trajectories for _, *times in t.spans for when in times]
                results[name] = result = summarise(trajectories, samples, max(took) - min(took))
                self._reporter.end_evaluation(step, name, result)
                if (step, name) not in known:
                    self._run.append_metrics({"step": step, "evaluation": name, **result.to_json()})
        return results

    def _figures(self, trajectories: Sequence[Trajectory], data: dict[str, float]) -> dict[str, float]:
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.task_id, []).append(trajectory)
        outcomes = [
            credit(Group(task_id, tuple(attempts)), self._plan.estimator, min_group=self._plan.min_group).outcome
            for task_id, attempts in groups.items()
        ]
        return {
            **measured(trajectories),
            "groups_trained": outcomes.count("trained"),
            "groups_without_spread": outcomes.count("no_spread"),
            "groups_too_small": outcomes.count("too_small"),
            "seconds": data["timing_s/step"],
            "rollout_seconds": data["timing_s/gen"],
            "train_seconds": data["timing_s/update_actor"],
            **{f"verl/{name.removeprefix('actor/')}": value for name, value in data.items() if name.startswith("actor/")},
        }
