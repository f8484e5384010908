"""One step of a recorded run as a picture: a row for each rollout, by what its time was spent on, and one for training."""

from pathlib import Path

from palestra.errors import UsageError
from palestra.lab.recording import Interval, Played, Step

ROWS = 150
"""Of more rollouts, so many are drawn, evenly spread over those of the step."""

_COLOURS = {
    "init": "#94a3b8",
    "waiting": "#e8edf3",
    "sampling": "#1d4ed8",
    "tools": "#f59e0b",
    "rest of the run": "#7dd3fc",
    "reward": "#16a34a",
    "failed attempts": "#dc2626",
    "training": "#c2410c",
}

_SHOWN_AS = {"waiting to run": "waiting", "waiting for reward": "waiting"}


def draw(step: Step, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rollouts = _spread(sorted(step.rollouts, key=lambda rollout: (rollout.first, rollout.end)))
    figure, axes = pyplot.subplots(figsize=(11, min(9.0, 2.6 + 0.09 * len(rollouts))), layout="constrained")
    seen = set()
    for row, rollout in enumerate(rollouts):
        for what, bars in _bars(rollout, step).items():
            axes.broken_barh(bars, (row - 0.45, 0.9), color=_COLOURS[what], linewidth=0)
            seen.add(what)
    thick = max(1.0, len(rollouts) / 25)
    trained = [*step.training, (step.collected, step.end)]
    bars = [(start - step.begin, end - start) for start, end in trained if end > start]
    axes.broken_barh(bars, (len(rollouts) + thick / 2, thick), color=_COLOURS["training"], linewidth=0)
    seen.add("training")
    axes.axvline(0.0, color="#111827", linewidth=0.8, linestyle=":")
    axes.axvline(step.end - step.begin, color="#111827", linewidth=0.8, linestyle=":")
    axes.set_ylim(len(rollouts) + 2 * thick, -1)
    axes.set_yticks([0, len(rollouts) - 1, len(rollouts) + thick], ["1", str(len(rollouts)), "training"], fontsize=11)
    axes.tick_params(axis="x", labelsize=11)
    axes.set_xlabel("seconds since the step began", fontsize=12)
    axes.set_ylabel("rollout", fontsize=12)
    some = f", {len(rollouts)} of {len(step.rollouts)} rollouts" if len(rollouts) < len(step.rollouts) else ""
    axes.set_title(f"Step {step.number + 1}: {step.end - step.begin:.1f} s{some}", fontsize=13)
    handles = [Patch(color=colour, label=what) for what, colour in _COLOURS.items() if what in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=11, frameon=False)
    try:
        figure.savefig(picture, dpi=120, format=picture.suffix.removeprefix(".") or "png")
    except OSError as error:
        raise UsageError(f"{picture}: {error.strerror}") from None
    except ValueError as error:  # a suffix that is no picture's
        raise UsageError(f"{picture}: {error}") from None
    finally:
        pyplot.close(figure)


def _spread(rollouts: list[Played]) -> list[Played]:
    if len(rollouts) <= ROWS:
        return rollouts
    return [rollouts[at * (len(rollouts) - 1) // (ROWS - 1)] for at in range(ROWS)]


def _bars(rollout: Played, step: Step) -> dict[str, list[Interval]]:
    """By colour, where each bar begins and how long it is. Nobody sees what is narrower than a thousandth of the step."""
    bars: dict[str, list[Interval]] = {}
    for what, (start, end) in (("waiting", (step.begin, rollout.first)), *rollout.pieces()):
        if end - start > 1e-3 * (step.end - step.begin):
            bars.setdefault(_SHOWN_AS.get(what, what), []).append((start - step.begin, end - start))
    return bars
