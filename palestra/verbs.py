"""The verbs as Python functions: what the command line does, callable from a script or a notebook's cell."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from palestra import environments, interrupts, sandboxes
from palestra.config import Config, Skyrl, Verl, load
from palestra.errors import UsageError

if TYPE_CHECKING:
    from palestra.checking import Verdict
    from palestra.evaluation import Result

T = TypeVar("T")


def train(
    config: Config | str | Path, *overrides: str, resume: bool = False, fresh: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Train as the config says, and return the run's summary. With `resume`, `config` is the folder of a run to go on with."""
    from palestra import training
    from palestra.report import Reporter
    from palestra.runs import RunFolder

    if resume:
        if overrides or fresh:
            raise UsageError("a run goes on as it was begun: overrides and fresh do not go with resume")
        run, resolved = RunFolder.reopen(Path(str(config)))
        run.refuse_fewer_steps(resolved)
        environments.require(resolved.backend.environment)
    else:
        resolved = _load(config, overrides)
        environments.require(resolved.backend.environment)
        run = RunFolder.create(resolved.run.folder, resolved, fresh)
    with closing(Reporter(resolved, run, quiet)) as reporter, interrupts.drained() as stopping:
        if isinstance(resolved.backend, Skyrl):
            from palestra.bridges.skyrl_train.entry import train as drive_skyrl

            return _aside(lambda: drive_skyrl(resolved, run, reporter, stopping))
        if isinstance(resolved.backend, Verl):
            from palestra.bridges.verl.driving import train as drive_verl

            return _aside(lambda: drive_verl(resolved, run, reporter, stopping))
        return _run(_with_sandboxes(resolved, training.train(resolved, run, reporter, stopping)))


def evaluate(config: Config | str | Path, *overrides: str, resume: bool = False, quiet: bool = False) -> "Result":
    """Evaluate on the held-out tasks. The trajectories are kept in a new folder `eval.N` in the run's folder. With `resume`,
    `config` is such a folder: what is missing or failed there is done."""
    from palestra import training
    from palestra.report import Reporter
    from palestra.runs import RunFolder, free_name

    if resume:
        if overrides:
            raise UsageError("an evaluation goes on as it was begun: overrides do not go with resume")
        run, resolved = RunFolder.reopen(Path(str(config)))
        if run.metrics.exists():
            raise UsageError(
                f"{run.path} is a run of `palestra train`; give the folder of an evaluation, such as {run.path / 'eval.1'}"
            )
        environments.require(resolved.backend.environment)
    else:
        resolved = _load(config, overrides)
        environments.require(resolved.backend.environment)
        run = RunFolder.create(free_name(resolved.run.folder / "eval"), resolved)
    with closing(Reporter(resolved, run, quiet)) as reporter:
        return _run(_with_sandboxes(resolved, training.evaluate_only(resolved, run, reporter)))


def check(
    config: Config | str | Path,
    *overrides: str,
    only: Sequence[str] = (),
    sample: int | None = None,
    on_verdict: "Callable[[Verdict], None]" = lambda _: None,
) -> dict[str, Any]:
    """Prove the config's task sets: gold scores 1, doing nothing scores 0."""
    from palestra import checking, taskset

    resolved = _load(config, overrides)
    tasks = [task for key in ("train", "heldout") if getattr(resolved.tasks, key) for task in taskset.load(resolved.tasks, key)]
    chosen = checking.choose(tasks, only, sample, resolved.run.seed)
    return _run(_with_sandboxes(resolved, checking.check(chosen, resolved.run.folder / "cache", on_verdict)))


def _load(config: Config | str | Path, overrides: Sequence[str]) -> Config:
    if not isinstance(config, Config):
        return load(Path(config), overrides)
    if overrides:
        raise UsageError("overrides go with a config file; change the Config itself")
    return config


async def _with_sandboxes(config: Config, work: Coroutine[Any, Any, T]) -> T:
    from palestra.sandbox.opening import make_provider

    async with sandboxes.provided(lambda: make_provider(config.sandbox)):
        return await work


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also where a loop is running already, as in a notebook."""
    return _aside(lambda: interrupts.run(work))


def _aside(work: Callable[[], T]) -> T:
    """Do something that runs an event loop of its own; in another thread where one is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
