"""The learning curve of a run as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def learning_curve(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Training reward of each step, and held-out success with its intervals, from the run's metrics."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = {row["step"]: row["reward"] for row in rows if "evaluation" not in row}
    axes.plot([step + 1 for step in steps], list(steps.values()), color="#9aa5b1", label="training reward")
    for name, colour, shift in (("sampled", "#c2410c", -0.04), ("greedy", "#1d4ed8", 0.04)):
        found = {row["step"]: row["pass@1"] for row in rows if row.get("evaluation") == name}
        if found:
            values = [rate["value"] for rate in found.values()]
            below = [max(0.0, rate["value"] - rate["low"]) for rate in found.values()]  # rounding may turn a 0 around
            above = [max(0.0, rate["high"] - rate["value"]) for rate in found.values()]
            places = [step + shift for step in found]
            axes.errorbar(
                places, values, yerr=[below, above], color=colour, marker="o", capsize=3, label=f"held-out success, {name}"
            )
    axes.set(xlabel="updates", ylabel="share", ylim=(-0.02, 1.02), title="Learning curve (bars: 95% intervals)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
