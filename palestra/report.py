"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere; TensorBoard and Weights & Biases
where asked for. It reads what happens and changes nothing."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from palestra.config import Config
from palestra.errors import ConfigError
from palestra.evaluation import Result
from palestra.plot import learning_curve
from palestra.runs import RunFolder
from palestra.trajectory import Trajectory

HEARTBEAT = 10.0
"""Seconds between lines where there is no terminal to redraw, so that nobody waits in the dark."""


class Reporter:
    """Reports to the console; `quiet` for use as a library. Close it at the end, come what may."""

    def __init__(self, config: Config, run: RunFolder, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        self._sinks = _sinks(config, run)
        self._started = self._phase_started = self._last_line = time.monotonic()
        self._title = ""
        self._total = self._done = self._tokens = 0
        self._rewards: list[float] = []
        self._step_seconds: list[float] = []
        self._steps_left = 0

    def begin_step(self, step: int, steps: int, rollouts: int) -> None:
        self._steps_left = steps - step
        self._begin(f"step {step + 1}/{steps}", rollouts)

    def begin_evaluation(self, step: int, rollouts: int) -> None:
        self._begin(f"evaluation after {step} steps", rollouts)

    def _begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done, self._tokens, self._rewards = title, total, 0, 0, []
        self._phase_started = self._last_line = time.monotonic()
        if self._live is not None:
            self._live.start()

    def trajectory(self, trajectory: Trajectory) -> None:
        self._done += 1
        self._tokens += trajectory.sampled_tokens or int(trajectory.usage.get("completion_tokens", 0))
        if trajectory.reward is not None:
            self._rewards.append(trajectory.reward)
        if self._live is not None:
            self._live.update(Text(self._progress()))
        elif time.monotonic() - self._last_line > HEARTBEAT:
            self._last_line = time.monotonic()
            self._console.print("  " + self._progress())

    def _progress(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._phase_started)
        reward = sum(self._rewards) / max(1, len(self._rewards))
        parts = [
            f"{self._title}: {self._done}/{self._total} rollouts",
            f"reward {reward:.2f}",
            f"{self._tokens / seconds:.0f} tokens/s",
        ]
        if self._step_seconds:
            left = self._steps_left * sum(self._step_seconds) / len(self._step_seconds)
            parts.append(f"about {_duration(left)} of training left")
        return ", ".join(parts)

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._end()
        self._step_seconds.append(metrics["seconds"])
        self._steps_left -= 1
        left = self._steps_left * sum(self._step_seconds) / len(self._step_seconds)
        sampled_in = "seconds" if "staleness" in metrics else "rollout_seconds"  # with staleness sampling never stops
        rate = metrics["sampled_tokens"] / max(1e-9, metrics[sampled_in])
        skipped = metrics["groups_without_spread"] + metrics["groups_too_small"]
        self._console.print(
            f"step {step + 1}: reward {metrics['reward']:.2f}, {metrics['turns']:.1f} turns, {rate:.0f} tokens/s, "
            f"{metrics['groups_trained']:.0f} groups trained, {skipped:.0f} without gradient, {metrics['failed']:.0f} failed, "
            f"{metrics['seconds']:.0f} s; about {_duration(left)} left"
        )
        self._log("train", step, metrics)

    def end_evaluation(self, step: int, name: str, result: Result) -> None:
        self._end()
        rates = ", ".join(f"pass@{k} {estimate}" for k, estimate in result.pass_at.items())
        failures = "".join(f", {count} {kind}" for kind, count in result.failures.items())
        self._console.print(
            f"held-out after {step} steps, {name}: {rates} on {result.tasks} tasks, {result.seconds:.0f} s{failures}",
            style="bold",
        )
        if result.usage:
            self._console.print(_charged(result.usage))
        self._log(f"heldout/{name}", step, {"success": result.success.value, "turns": result.turns})

    def warm_start(self, step: int, steps: int, loss: float) -> None:
        self._console.print(f"warm start {step + 1}/{steps}: loss {loss:.3f}")

    def stopped(self, folder: Path, step: int) -> None:
        self._end()
        self._console.print(f"stopped after {step} steps; everything is saved. Go on with: palestra train --resume {folder}")

    def finished(self, run: RunFolder, summary: Mapping[str, Any]) -> None:
        self._end()
        learning_curve(run.read_metrics(), run.curve)
        self._console.print(f"learning curve: {run.curve}")

    def close(self) -> None:
        """Give the terminal back, and let the sinks write what they hold."""
        self._end()
        for sink in self._sinks:
            sink.close()

    def _log(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(group, step, values)


class _TensorBoard:
    def __init__(self, run: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"))

    def log(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, project: str, config: Config, run: RunFolder) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, config=config.model_dump(mode="json"), dir=str(run.path))

    def log(self, group: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()


def _sinks(config: Config, run: RunFolder) -> list[_TensorBoard | _Wandb]:
    sinks: list[_TensorBoard | _Wandb] = []
    try:
        if config.report.tensorboard:
            sinks.append(_TensorBoard(run))
        if config.report.wandb is not None:
            sinks.append(_Wandb(config.report.wandb, config, run))
    except ImportError as error:
        raise ConfigError(
            f"the section [report] asks for {error.name!r}, which is not installed: pip install {error.name}"
        ) from None
    return sinks


def _charged(usage: Mapping[str, float]) -> str:
    counts = ", ".join(f"{amount:,.0f} {name.replace('_', ' ')}" for name, amount in usage.items() if name != "cost" and amount)
    return f"the server: {counts}" + (f", cost {usage['cost']:.4f}" if usage.get("cost") else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
