"""The scheduler lab's race: published schedules and our own over one workload, on a virtual clock, against the physical limit."""

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from palestra import dispatch
from palestra.config import StreamDispatch
from palestra.errors import UsageError, where_it_failed
from palestra.lab.ceiling import ceiling, generation_seconds
from palestra.lab.cluster import Elastic, Policy, balance
from palestra.lab.own import Setup, simulate_own
from palestra.lab.published import batch, bounded, pipeline
from palestra.lab.simulation import Figures, simulate_published
from palestra.lab.workload import Workload, load
from palestra.protocols import Capacity
from palestra.taskset import find_object

SWEEP_STEPS = 4
"""Steps over which each setting of the published pipeline is tried; the best one then runs them all."""

PIECE = 256
"""Tokens of a reply for which stream's sampler keeps room at a time, as the embedded one does."""

AGENTS = (96, 192, 288, 384, 512)
JUDGES = (96, 192, 288, 512)


@dataclass(frozen=True)
class Entry:
    """One schedule in the race."""

    name: str
    staleness: int
    run: Callable[[Workload, int, int], Figures]
    """Workload, seed, steps."""


@dataclass(frozen=True)
class Race:
    rows: list[dict[str, Any]]
    """One for each schedule and seed."""
    fault: UsageError | None = None
    """Why the outside dispatcher has none."""


@dataclass(frozen=True)
class _Published:
    schedule: Any
    agents: int = 0
    judges: int = 0

    def __call__(self, workload: Workload, seed: int, steps: int) -> Figures:
        settings = {"max_parallel_agents": self.agents, "max_eval_parallel_agents": self.judges or self.agents}
        return simulate_published(workload, self.schedule, settings, seed, steps)


@dataclass(frozen=True)
class _Outside:
    """A dispatcher from a file, with the published signature. It is found anew in each process."""

    where: str

    def __call__(self, workload: Workload, seed: int, steps: int) -> Figures:
        schedule = find_outside(self.where)
        try:
            return _Published(schedule, 96)(workload, seed, steps)
        except UsageError as error:
            raise UsageError(f"--dispatcher {self.where}: {error}") from None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  # the user can mend it
            raise UsageError(f"--dispatcher {self.where}: {where_it_failed(error)}") from None


@dataclass(frozen=True)
class _Own:
    staleness: int
    piece: int

    def __call__(self, workload: Workload, seed: int, steps: int) -> Figures:
        return simulate_own(workload, own_setup(workload, self.staleness, self.piece), seed, steps)


def own_setup(workload: Workload, staleness: int, piece: int = PIECE) -> Setup:
    """Stream as one would configure it for this workload: as many inits and rewards at once as have a processor, and runs as the
    KV budget admits them. Strictly on-policy, units turn to training as runs end; with staleness, some units always train."""
    rollouts = workload.batch.tasks * workload.batch.samples
    section = StreamDispatch(
        kind="stream",
        init=max(1, int(workload.init.capacity)),
        run=rollouts,
        reward=max(1, int(workload.reward.capacity)),
        runtimes=rollouts if staleness else rollouts * 3 // 2,
    )
    capacity = Capacity(workload.engine.units * workload.engine.kv_tokens)
    if staleness == 0:
        policy: Callable[[], Policy] = Elastic
    else:
        generation = generation_seconds(workload, workload.draw(0, 0), piece)

        def policy() -> Policy:
            return balance(workload, generation)

    return Setup(lambda: dispatch.make(section, capacity), policy, staleness, piece)


def find_outside(where: str) -> Any:
    """The function of `FILE:function`."""
    file, colon, function = where.rpartition(":")
    path = Path(file)
    if not colon or not function or path.suffix != ".py" or not path.is_file():
        raise UsageError(f"--dispatcher {where}: write FILE:function, with the path of a .py file that is there")
    if "." in path.stem:
        raise UsageError(f"--dispatcher {where}: a module's name has no dot; rename the file")
    try:
        found = find_object(f"{path.stem}:{function}", path.parent, "--dispatcher")
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # the user can mend it
        raise UsageError(f"--dispatcher {where}: {where_it_failed(error)}") from None
    if not callable(found):
        raise UsageError(f"--dispatcher {where}: {function} is {type(found).__name__}, not a function")
    return found


def bench_dispatch(
    console: Console,
    workload_name: str,
    seeds: Sequence[int],
    outside: str | None,
    steps: int | None = None,
    piece: int = PIECE,
) -> Race:
    """Race all schedules over the workload, and print the tables."""
    workload = load(workload_name)
    count = workload.batch.steps if steps is None else steps
    if outside is not None:
        _Outside(outside)(workload, seeds[0], 1)  # a mistake in it shows at once
    console.print(f"{workload_name}: {count} steps of {workload.batch.tasks} × {workload.batch.samples}, seeds {list(seeds)}")
    console.print(_limits(workload, seeds[0], count))
    with _processes() as pool:
        trial_steps = min(SWEEP_STEPS, count)
        console.print(f"trying {len(AGENTS) * len(JUDGES)} settings of the published pipeline, {trial_steps} steps each")
        best = _tune(workload, pool, seeds[0], trial_steps)
        console.print(f"the published pipeline is best here with {best.agents} agents and {best.judges} judges")
        entries = [*_entries(best, piece), *([Entry(outside, 0, _Outside(outside))] if outside else [])]
        running = [(entry, seed, pool.submit(entry.run, workload, seed, count)) for entry in entries for seed in seeds]
        results: dict[tuple[str, int], tuple[Entry, Figures]] = {}
        fault = None
        for entry, seed, future in running:
            try:
                figures = future.result()
            except UsageError as error:  # the outside dispatcher's, whose other seeds are of no use then
                if entry.name != outside:
                    raise
                fault = error
                break
            results[entry.name, seed] = entry, figures
            console.print(_line(entry, seed, figures))
        if fault is not None:
            results = {(name, seed): result for (name, seed), result in results.items() if name != outside}
        rows = [_row(entry, seed, figures, results) for (_, seed), (entry, figures) in results.items()]
        console.print(_table(rows))
        console.print(_unit_time_table(rows))
    ceilings = [ceiling(workload, seed, piece, count) for seed in seeds]
    console.print(
        f"with replies in pieces of {piece} tokens, no schedule can exceed "
        f"{fmean(each.bound for each in ceilings):.3f} of the limit, which counts publishing on all units; with tools that take "
        f"their time, {fmean(each.with_tools for each in ceilings):.3f} is left where all of the engine's steps are equally long"
    )
    return Race(rows, fault)


def _limits(workload: Workload, seed: int, steps: int) -> str:
    each = [workload.limits(workload.draw(seed, step)) for step in range(steps)]
    gpu, init, reward, longest, step = (
        fmean(getattr(limits, name) for limits in each) for name in ("gpu", "init", "reward", "critical_path", "step")
    )
    return (
        f"a step's limits: generation {gpu:.0f} s, init {init:.0f} s, reward {reward:.0f} s, longest trajectory {longest:.0f} s, "
        f"generation, training and publishing {step:.0f} s"
    )


def _line(entry: Entry, seed: int, figures: Figures) -> str:
    """What is said as soon as it is known."""
    hourly, share = figures.samples_per_hour, figures.of_limit
    return f"{entry.name}, seed {seed}: {hourly:.0f} samples an hour, {share:.3f} of the limit"


@contextmanager
def _processes() -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(os.cpu_count(), initializer=_end_with_parent)
    try:
        yield pool
    except BaseException:  # nobody waits any more for what has begun
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A process that is killed cannot end those that work for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _entries(best: _Published, piece: int) -> list[Entry]:
    return [
        Entry("bounded_96", 0, _Published(bounded, 96)),
        Entry("batch", 0, _Published(batch)),
        Entry("pipeline_96", 0, _Published(pipeline, 96)),
        Entry("pipeline_288", 0, _Published(pipeline, 288)),
        Entry("pipeline_best", 0, best),
        Entry("stream", 0, _Own(0, piece)),
        Entry("stream_stale", 1, _Own(1, piece)),
    ]


def _tune(workload: Workload, pool: ProcessPoolExecutor, seed: int, steps: int) -> _Published:
    """The settings with which the published pipeline is fastest."""
    settings = [_Published(pipeline, agents, judges) for agents in AGENTS for judges in JUDGES]
    trials = [pool.submit(each, workload, seed, steps) for each in settings]
    return max(zip(settings, trials, strict=True), key=lambda pair: pair[1].result().samples_per_hour)[0]


def _row(entry: Entry, seed: int, figures: Figures, results: dict[tuple[str, int], tuple[Entry, Figures]]) -> dict[str, Any]:
    def against(name: str) -> float:
        return figures.samples_per_hour / results[name, seed][1].samples_per_hour

    return {
        "schedule": entry.name,
        "staleness": entry.staleness,
        "seed": seed,
        "samples_per_hour": figures.samples_per_hour,
        "vs_bounded_96": against("bounded_96"),
        "vs_pipeline_96": against("pipeline_96"),
        "vs_pipeline_288": against("pipeline_288"),
        "vs_pipeline_best": against("pipeline_best"),
        "of_limit": figures.of_limit,
        "gpu_use": figures.gpu_use,
        "reprefill_share": figures.reprefill_share,
        "peak_runtimes": figures.peak_runtimes,
        "groups_dropped": figures.groups_dropped,
        "unit_time": asdict(figures.unit_time),
    }


_COLUMNS = {
    "samples_per_hour": ("per\nhour", ".0f"),
    "vs_bounded_96": ("×\n96\nslots", ".2f"),
    "vs_pipeline_96": ("×\npipe\n96", ".2f"),
    "vs_pipeline_288": ("×\npipe\n288", ".2f"),
    "vs_pipeline_best": ("×\nbest\npipe", ".2f"),
    "of_limit": ("of\nlimit", ".3f"),
    "gpu_use": ("GPU\nuse", ".2f"),
    "reprefill_share": ("again", ".2f"),
    "peak_runtimes": ("peak", ".0f"),
    "groups_dropped": ("drops", ".0f"),
}
_LEGEND = (
    "per hour: samples; slots: bounded; pipe: the published pipeline; stream_stale: with staleness 1; "
    "again: prefilled tokens whose KV had been there before; peak: runtimes at once; drops: groups dropped"
)


_UNIT_TIME_COLUMNS = {
    "generation": "gen",
    "training": "train",
    "publishing": "pub",
    "chunks": "chunk",
    "again": "again",
    "reserved": "kept",
    "waiting": "wait",
    "empty": "empty",
    "idle": "idle",
    "start": "start",
}
_UNIT_TIME_LEGEND = (
    "where the units' time went, in per cent. gen: generation at full KV, every token once, as the limit counts it; "
    "chunk: what chunks of prefill lack; again: prefilled again; kept: KV for what is about to be written; "
    "wait: KV of contexts that wait for a tool or for room; empty: KV that nobody holds; idle: units with nothing to do; "
    "start: both until the first training"
)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """The mean over seeds of each schedule. It fits a terminal of 80 columns."""
    table = _empty_table([title for title, _ in _COLUMNS.values()], _LEGEND)
    for name, mine in _by_schedule(rows):
        table.add_row(name, *(format(fmean(row[key] for row in mine), form) for key, (_, form) in _COLUMNS.items()))
    return table


def _unit_time_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = _empty_table([*_UNIT_TIME_COLUMNS.values()], _UNIT_TIME_LEGEND)
    for name, mine in _by_schedule(rows):
        table.add_row(name, *(format(100 * fmean(row["unit_time"][key] for row in mine), "z.1f") for key in _UNIT_TIME_COLUMNS))
    return table


def _empty_table(titles: Sequence[str], legend: str) -> Table:
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    schedule = Column("schedule", overflow="fold", min_width=13)
    return Table(schedule, *columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=legend)


def _by_schedule(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name in dict.fromkeys(row["schedule"] for row in rows):
        yield name, [row for row in rows if row["schedule"] == name]
