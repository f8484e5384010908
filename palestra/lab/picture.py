"""Pictures of schedules: what every rollout of a few small steps does when, and when the units train."""

from pathlib import Path

from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.lab import clock
from palestra.lab.cluster import Balance, Elastic
from palestra.lab.own import Setup, play
from palestra.lab.simulation import World
from palestra.lab.workload import Workload, load


def _after_all_runs() -> Elastic:
    """No unit trains while a run is under way."""
    return Elastic(slack=-1.0)


SETUPS = {
    "batch": Setup(Batch, _after_all_runs),
    "bounded": Setup(lambda: Bounded(8), _after_all_runs),
    "pipeline": Setup(lambda: Pipeline(8, 8, 8, 4), _after_all_runs),
    "stream": Setup(lambda: Stream(4, 16, 6, 24), Elastic),
    "stream, staleness 1": Setup(lambda: Stream(4, 16, 6, 24), lambda: Balance(1, pile=3, few=0), 1),
}

_COLOURS = {"init": "#94a3b8", "run": "#1d4ed8", "reward": "#16a34a", "train": "#c2410c", "publish": "#111827"}

Log = list[tuple[int, str, float, float]]


def draw_schedules(folder: Path) -> list[Path]:
    """One picture for each schedule, all on the same scale of time."""
    workload = load("sketch")
    logs = {name: clock.run(_log(workload, setup)) for name, setup in SETUPS.items()}
    longest = max(end for log in logs.values() for *_, end in log)
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(name, log, longest, folder / f"dispatch-{_slug(name)}.png") for name, log in logs.items()]


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


async def _log(workload: Workload, setup: Setup) -> Log:
    world = World(workload, setup.policy(), setup.first)
    world.logs = True
    await play(world, setup, seed=0)
    return world.log + [(-1, "train", start, end) for start, end in world.cluster.trained]


def _draw(name: str, log: Log, longest: float, picture: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    seen: set[str] = set()
    for order, what, start, end in log:
        label = None if what in seen else what
        seen.add(what)
        axes.barh(order if order >= 0 else -2, end - start, left=start, height=0.8, color=_COLOURS[what], label=label)
    finished = max(end for *_, end in log)
    axes.axvline(finished, color="#111827", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, longest * 1.02), xlabel="seconds", ylabel="rollout", title=f"{name}: three steps in {finished:.0f} s")
    axes.invert_yaxis()
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture
