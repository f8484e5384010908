"""`palestra bench dispatch --real`: the dispatchers on a real model, in wall time.

Torch samples and trains on one core. Inits and rewards burn real processor time on the other, and wait as for a container or a
download; tools wait too. The same training steps run under each dispatcher, and the lab replays each recorded run.
"""

import asyncio
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra import taskset
from palestra.bench.step import quickstart
from palestra.config import Config
from palestra.errors import InfrastructureError, UsageError
from palestra.ledger import Ledger
from palestra.message import Message
from palestra.plan import plan
from palestra.runs import RunFolder
from palestra.task import AnyTask, Score, Task
from palestra.trajectory import Trajectory
from palestra.verbs import train

INIT_WAIT, INIT_WORK = 3.0, 0.5
TOOL_WAIT = 0.5
REWARD_WAIT, REWARD_WORK = 13.25, 0.75
"""Seconds of waiting, and of processor time. A reward takes four times as long as an init, as in W1."""

SLOTS = 8
"""What bounded and pipeline hold, for three times as many rollouts in a step: the published runs had five times as many."""

DISPATCHERS: dict[str, dict[str, Any]] = {
    "bounded": {"kind": "bounded", "slots": SLOTS},
    "pipeline": {"kind": "pipeline", "init": SLOTS, "run": SLOTS, "reward": SLOTS, "queue": SLOTS},
    # Rewards mostly wait, so all of a step may be in theirs at once.
    "stream": {"kind": "stream", "init": SLOTS, "run": 3 * SLOTS, "reward": 3 * SLOTS, "runtimes": 6 * SLOTS},
}

_BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
while time.process_time() < float(sys.argv[1]): pass
"""


@dataclass(frozen=True)
class Costly(Task[Any, Any]):
    """A task whose init, tools and reward cost what they do elsewhere: waiting, and a processor's time."""

    inner: AnyTask
    core: int

    async def setup(self, stack: AsyncExitStack) -> Any:
        await asyncio.sleep(INIT_WAIT)
        await burn(INIT_WORK, self.core)
        return await self.inner.setup(stack)

    def prompt(self, env: Any) -> Sequence[Message]:
        return self.inner.prompt(env)

    def tools(self, env: Any) -> Sequence[Callable[..., object]]:
        return [_slow(tool) for tool in self.inner.tools(env) if callable(tool)]

    async def score(self, artifact: Any, trajectory: Trajectory, stack: AsyncExitStack) -> float | Score:
        await asyncio.sleep(REWARD_WAIT)
        await burn(REWARD_WORK, self.core)
        return await self.inner.score(artifact, trajectory, stack)


def _slow(tool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tool)
    async def slow(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(TOOL_WAIT)
        return tool(*arguments, **named)

    return slow


async def burn(seconds: float, core: int) -> None:
    """So much processor time, in another process on that core."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", _BURN, str(seconds), str(core))
    try:
        if await process.wait() != 0:
            raise InfrastructureError("the process that burns time has failed")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def costly(which: str, core: int) -> list[Costly]:
    """The quickstart's tasks, made costly."""
    return [Costly(task.id, task, core) for task in taskset.load(quickstart().tasks, which)]


def training_tasks(core: int) -> list[Costly]:
    return costly("train", core)


def heldout_tasks(core: int) -> list[Costly]:
    return costly("heldout", core)


def bench_real(console: Console, steps: int = 3) -> list[dict[str, Any]]:
    """Train under each dispatcher; a row for each, with its wall time, what it learned from, and the lab's replay."""
    torch_core, other_core = _two_cores()
    rows: list[dict[str, Any]] = []
    adapters: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder, _on_core(torch_core):
        for name, section in DISPATCHERS.items():
            config = _config(Path(folder) / name, section, steps, other_core)
            console.print(f"{name}: {steps} steps of 6 × 4 …")
            train(config, quiet=True)
            rows.append(_measure(name, RunFolder(config.run.folder)))
            adapters[name] = config.run.folder
        same = _same_samples(list(adapters.values()))
    for row in rows:
        row["vs_bounded"] = rows[0]["seconds"] / row["seconds"]
        row["same_samples"] = same
    console.print(_table(rows))
    console.print(f"{same:.0%} of the trajectories are the same, token by token, under all dispatchers")
    return rows


def _config(folder: Path, section: dict[str, Any], steps: int, core: int) -> Config:
    base = quickstart()
    assert base.training is not None
    values = base.model_dump(mode="json", exclude_none=True)
    values["run"]["folder"] = str(folder)
    values["tasks"] = {
        "train": "palestra.bench.real:training_tasks",
        "heldout": "palestra.bench.real:heldout_tasks",
        "arguments": {"core": core},
        "folder": str(folder),  # so that the module is looked for among the installed ones
    }
    values["training"] |= {"steps": steps, "groups": 6, "samples": 4}
    values["backend"]["threads"] = 1
    values["evaluation"] = {"tasks": 2, "greedy": False}
    values["dispatch"] = section
    return Config.model_validate(values)


def _two_cores() -> tuple[int, int]:
    if not hasattr(os, "sched_getaffinity"):
        raise UsageError("--real pins work to cores, which only Linux can do; run it without --real")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UsageError(f"--real needs two cores, and this process may use {len(cores)}")
    return cores[0], cores[1]


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(name: str, run: RunFolder) -> dict[str, Any]:
    rows = [row for row in run.read_metrics() if "evaluation" not in row]
    replayed = plan(run.path)
    return {
        "dispatcher": name,
        "seconds": sum(row["seconds"] for row in rows),
        "replay_seconds": replayed.replayed,
        "replay_error": replayed.replayed / replayed.recorded - 1,
        "rewards": [row["reward"] for row in rows],
        "sampled_tokens": sum(row["sampled_tokens"] for row in rows),
    }


def _same_samples(folders: Sequence[Path]) -> float:
    """The share of trajectories that are the same, token by token, in all runs."""
    tokens = []
    for folder in folders:
        with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
            recorded = ledger.trajectories(phase="train")
            tokens.append({row.key: [segment.tokens for segment in row.trajectory.segments] for row in recorded})
    return sum(all(other.get(key) == said for other in tokens[1:]) for key, said in tokens[0].items()) / len(tokens[0])


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("dispatcher", "seconds", "× bounded", "the lab's replay", "reward of each step")
    for row in rows:
        rewards = ", ".join(f"{reward:.2f}" for reward in row["rewards"])
        replay = f"{row['replay_seconds']:.1f} s ({row['replay_error']:+.0%})"
        table.add_row(row["dispatcher"], f"{row['seconds']:.1f}", f"{row['vs_bounded']:.2f}", replay, rewards)
    return table
