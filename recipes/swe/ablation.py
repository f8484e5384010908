"""What code search and hints are worth: localisation with and without each, on the same held-out tasks and seeds.

    python recipes/swe/ablation.py runs/ablation [KEY=VALUE …]

Trains once with search and once with bash alone, evaluates before and after, with hints and without, compares by pairs, and says
what training took to earn the same reward. What the folder holds already is not done again.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import palestra
from palestra.comparison import Comparison, Pairs, compare, cost_to_reach
from palestra.runs import RunFolder

RECIPE = Path(__file__).with_name("localise.toml")
SEARCH = {"search": "tasks.arguments.search=true", "bash": "tasks.arguments.search=false"}
HINTS = {"without": "hints.rules=off", "with": "hints.rules=on"}
WHEN = ("before", "after")
EVALUATION = ("evaluation.tasks=50", "evaluation.samples=4", "hints.evaluation=true")
REACH = (0.5, 0.7, 0.9)

Arm = tuple[str, str, str]
"""Which tools, before or after training, with hints or without."""


def main(folder: Path, *overrides: str) -> None:
    for tools in SEARCH:
        train(folder / tools, *overrides, SEARCH[tools])
    arms = {arm: evaluate(folder, arm, overrides) for arm in product(SEARCH, WHEN, HINTS)}
    pairs = [
        *((("bash", when, hints), ("search", when, hints)) for when, hints in product(WHEN, HINTS)),
        *(((tools, when, "without"), (tools, when, "with")) for tools, when in product(SEARCH, WHEN)),
        *(((tools, "before", hints), (tools, "after", hints)) for tools, hints in product(SEARCH, HINTS)),
    ]
    compared = {pair: compare(*(str(arms[arm]) for arm in pair)) for pair in pairs}
    sys.stdout.write("\n".join([*_arms(compared), "", *_differences(compared), "", *_costs(folder)]) + "\n")
    written = [{"before": a, "after": b, **each.to_json()} for (a, b), each in compared.items()]
    (folder / "ablation.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def train(folder: Path, *overrides: str) -> None:
    if not RunFolder(folder).summary.exists():
        palestra.train(RECIPE, *overrides, f"run.folder={folder}", fresh=True)


def evaluate(folder: Path, arm: Arm, overrides: tuple[str, ...]) -> Path:
    tools, when, hints = arm
    place = folder / "-".join(arm)
    if not (done := [each.parent for each in place.glob("eval.*/summary.json")]):
        adapter = [f"backend.adapter={(folder / tools / 'adapter').resolve()}"] if when == "after" else []
        settings = (*overrides, SEARCH[tools], HINTS[hints], *EVALUATION, *adapter)
        palestra.evaluate(RECIPE, *settings, f"run.folder={place}")
        done = [each.parent for each in place.glob("eval.*/summary.json")]
    return done[-1]


Compared = dict[tuple[Arm, Arm], Comparison]


def _arms(compared: Compared) -> Iterator[str]:
    yield "| tools | training | hints | pass@1 | pass@4 | turns | tokens | calls of an attempt |"
    yield "|---|---|---|---|---|---|---|---|"
    shown = {arm: (each.pairs["sampled"], side) for pair, each in compared.items() for side, arm in enumerate(pair)}
    for arm, (pairs, side) in shown.items():
        rates = [str((rate.before, rate.after)[side]) for k, rate in pairs.pass_at.items() if k in (1, 4)]
        means = {name: values[side] for name, values in pairs.means.items()}
        cells = [*arm, *rates, f"{means['turns']:.2f}", f"{means['tokens sampled']:.1f}", _calls(means)]
        yield f"| {' | '.join(cells)} |"


def _calls(means: dict[str, float]) -> str:
    calls = {name.removeprefix("calls of "): mean for name, mean in means.items() if "calls" in name and mean >= 0.01}
    return ", ".join(f"{name} {mean:.2f}" for name, mean in [*calls.items(), ("hints", means["hints"])])


def _differences(compared: Compared) -> Iterator[str]:
    yield "| from | to | pass@1 | pass@4 |"
    yield "|---|---|---|---|"
    for (before, after), each in compared.items():
        cells = [", ".join(before), ", ".join(after), *_rates(each.pairs["sampled"])]
        yield f"| {' | '.join(cells)} |"


def _rates(pairs: Pairs) -> Iterator[str]:
    for k, rate in pairs.pass_at.items():
        if k in (1, 4):
            yield f"{rate.difference.value:+.3f} [{rate.difference.low:+.3f}, {rate.difference.high:+.3f}]"


def _costs(folder: Path) -> Iterator[str]:
    yield "| tools | reward of a step | after steps | tokens sampled | CPU-seconds |"
    yield "|---|---|---|---|---|"
    for tools, share in product(SEARCH, REACH):
        cost = cost_to_reach(RunFolder(folder / tools).read_metrics(), share)
        cells = [str(cost.steps), f"{cost.sampled_tokens:,.0f}", f"{cost.cpu_seconds:,.0f}"] if cost else ["never", "", ""]
        yield f"| {' | '.join([tools, str(share), *cells])} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
