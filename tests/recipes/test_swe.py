"""The software-engineering recipe, as a user runs it: an oracle mends bugs with the tools, and its work is in the ledger."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from swe.factory.conftest import needs_bwrap

from palestra import config, evaluate
from palestra.ledger import Ledger

TOML = Path(__file__).parents[2] / "recipes" / "swe" / "factory.toml"


@needs_bwrap
def test_an_oracle_with_the_tools_mends_bugs_end_to_end(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    loaded = config.load(
        TOML,
        [
            f"run.folder={tmp_path / 'run'}",
            "backend.kind=scripted",
            "backend.script=factory_oracle:mend",
            f"backend.model={make_folder('smollm2')}",
            "evaluation.tasks=2",
            "evaluation.samples=1",
            "agent.context=400000",  # the tests' tokenizer knows few words
        ],
    )
    result = evaluate(loaded, quiet=True)
    assert (result.success.value, result.tasks, result.failures) == (1.0, 2, {})
    with Ledger.open(tmp_path / "run" / "eval.1" / "ledger.sqlite", read_only=True) as ledger:
        trajectories = ledger.finished("eval", 0).values()
    assert len(trajectories) == 2
    for each in trajectories:
        assert (each.reward, each.stop) == (1.0, "finish")
        assert each.artifact.startswith("diff --git a/")
        calls = Counter(call.name for turn in each.turns for call in turn.message.calls)
        assert calls == {"bash": 2, "search_symbol": 1, "view": 1, "edit": 1, "finish": 1}
        assert any("is edited. It now reads:" in message.text for message in each.messages)
