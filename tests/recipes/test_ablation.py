"""The ablation's tables, from runs and evaluations that are there already."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest

from palestra.ledger import Ledger
from palestra.message import ToolCall, assistant
from palestra.trajectory import Key, Segment, Trajectory, Turn

SCRIPT = Path(__file__).parents[2] / "recipes" / "swe" / "ablation.py"


def done(folder: Path, tool: str, successes: int) -> None:
    """An evaluation of 20 tasks with four attempts at each: the first so many tasks are solved."""
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        for task, index in product(range(20), range(4)):
            turn = Turn(assistant("", ToolCall("0", tool, {})), "stop", 0, (0, 1))
            segment = Segment([1], [True], [0.0], [0])
            reward = float(task < successes)
            trajectory = Trajectory(f"t{task}", index, segments=[segment], turns=[turn], reward=reward, stop="finish")
            ledger.record(Key("eval", 0, f"t{task}", index), trajectory)


def trained(folder: Path, success: float) -> None:
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    figures = {"sampled_tokens": 1200, "seconds": 3.0, "cpu_seconds": 5.0}
    rows = [{"step": step, "reward": reward, **figures} for step, reward in enumerate((0.1, success))]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_what_is_done_is_compared_and_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("ablation", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    ablation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ablation)
    trained(tmp_path / "search", 0.9)
    trained(tmp_path / "bash", 0.6)
    solved = {"search": 15, "bash": 5}
    for tools, when, hints in product(solved, ("before", "after"), ("with", "without")):
        done(tmp_path / f"{tools}-{when}-{hints}" / "eval.1", tools, solved[tools] + 2 * (when == "after"))
    ablation.main(tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("| bash | before | without | 0.25 [")
    assert said[2].endswith("| 1.00 | 1.0 | bash 1.00, hints 0.00 |")
    assert any(line.startswith("| bash, before, without | search, before, without | +0.500 [+0.300, +0.700]") for line in said)
    assert any(line.startswith("| search, after, without | search, after, with | +0.000 [") for line in said)
    assert "| search | 0.9 | 1 | 1,200 | 5 |" in said
    assert "| bash | 0.7 | never |  |  |" in said
    assert len(json.loads((tmp_path / "ablation.json").read_text())) == 12
