"""`palestra try`: one task, printed live, turn by turn."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from palestra import agent, interrupts, taskset
from palestra.backends.opening import open_backend
from palestra.collect import prepare
from palestra.config import Config, load
from palestra.errors import ConfigError, nearest
from palestra.ledger import Ledger
from palestra.message import Message, to_json
from palestra.rollout import Rollout, describe, run_through
from palestra.runs import RunFolder
from palestra.sandbox.opening import make_provider
from palestra.sandboxes import provided
from palestra.task import AnyTask
from palestra.training import make_collector, sampling_of
from palestra.trajectory import Key

_COLOURS = {"system": "bright_black", "user": "cyan", "assistant": "green", "tool": "yellow"}


def try_task(path: Path, overrides: Sequence[str], task_id: str | None) -> int:
    config = load(path, overrides)
    task = _find(taskset.load(config.tasks, "heldout"), task_id)
    return interrupts.run(_try(config, task, Console(highlight=False)))


def _find(tasks: Sequence[AnyTask], task_id: str | None) -> AnyTask:
    if task_id is None:
        return tasks[0]
    for task in tasks:
        if task.id == task_id:
            return task
    raise ConfigError(f"--task: no held-out task {task_id!r}{nearest(task_id, [task.id for task in tasks][:1000])}")


async def _try(config: Config, task: AnyTask, console: Console) -> int:
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.sqlite") as ledger:
        async with provided(lambda: make_provider(config.sandbox)), open_backend(config, training=False) as backend:
            collector = make_collector(config, backend, ledger, RunFolder(Path(folder)))
            await prepare(task, collector.cache)
            limits = agent.Limits.of(config.agent)
            opener = collector.opener(sampling_of(config))
            key = Key("eval", 0, task.id, 0)
            rollout = Rollout(
                task,
                key,
                opener,
                limits,
                config.run.seed,
                watch=lambda message: _show(console, message),
                hints=collector.hints_for(key),
                open_tools=collector.open_tools,
            )
            await run_through(rollout)
    trajectory = rollout.trajectory
    if trajectory.failure is not None:
        console.print(describe(trajectory.failure), style="bold red", markup=False)
        return 1
    seconds = ", ".join(f"{stage} {value:.1f} s" for stage, value in trajectory.seconds.items())
    console.print(
        f"{task.id}: stop {trajectory.stop}, answer {trajectory.answer!r}, reward {trajectory.reward:g} ({seconds})", markup=False
    )
    return 0


def _show(console: Console, message: Message) -> None:
    text = message.text
    if message.thinking:
        text = f"(thinking) {message.thinking}\n{text}"
    for call in to_json(message).get("tool_calls", ()):
        text += f"\n→ {call['function']['name']}({call['function']['arguments']})" + (
            f" !! {call['fault']}" if "fault" in call else ""
        )
    title = message.role if message.name is None else f"{message.role}: {message.name}"
    console.print(Panel(Text(text.strip()), title=title, title_align="left", border_style=_COLOURS[message.role]))
