"""The recipe file for a 32B model runs one step on the CPU through SkyRL-train: sandboxes, tools, hidden tests, one update."""

from pathlib import Path

from rehearsing import LEARNING_RATE, check_the_ledger, largest_move, make_model, needs_bwrap, rehearse


@needs_bwrap
def test_the_recipe_file_runs_one_step(tmp_path: Path) -> None:
    model, folder = make_model(tmp_path / "model"), tmp_path / "run"
    step = rehearse("skyrl", model, folder)
    check_the_ledger(folder)
    assert step["skyrl/policy/policy_loss"] != 0
    # Adam's first step moves a weight by no more than the learning rate.
    assert 0 < largest_move(model, folder / "adapter") < 1.1 * LEARNING_RATE
