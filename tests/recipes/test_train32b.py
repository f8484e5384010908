"""The recipe for a 32B model: what the docs say of its rehearsal is what the rehearsal does, and no setting of learning is among
the overrides."""

import shlex
import tomllib

from rehearsing import RECIPES, ROOT, SIZES

from palestra import taskset
from palestra.config import load

NOT_SIZES = ("loss", "hints", "sandbox", "run.seed", "training.learning_rate", "training.estimator", "sampling.temperature")


def test_the_docs_list_every_override_of_the_rehearsal() -> None:
    docs = (ROOT / "docs" / "swe.md").read_text(encoding="utf-8").replace("\\\n", " ")
    [command] = [shlex.split(line) for line in docs.splitlines() if "swe-rehearsal-model run.folder" in line]
    named = {word.partition("=")[0]: word for word in command[3:]}
    assert {named.pop(key) for key in list(named) if key not in ("backend.kind", "backend.model", "run.folder")} == set(SIZES)
    assert set(named) == {"backend.kind", "backend.model", "run.folder"}


def test_only_sizes_are_overridden() -> None:
    assert not [override for override in SIZES if override.startswith(NOT_SIZES)]
    whole, small = load(RECIPES / "train32b.toml"), load(RECIPES / "train32b.toml", SIZES)
    assert whole.training is not None
    assert small.training is not None
    assert (small.loss, small.hints, small.sandbox, small.dispatch) == (whole.loss, whole.hints, whole.sandbox, whole.dispatch)
    assert small.training.model_copy(update={"steps": 200, "groups": 64}) == whole.training


def test_it_is_the_factorys_recipe_on_another_backend() -> None:
    factory, large = (tomllib.loads((RECIPES / name).read_text(encoding="utf-8")) for name in ("factory.toml", "train32b.toml"))
    for section in ("tasks", "agent", "sampling", "hints", "loss", "sandbox", "evaluation"):
        assert factory[section] == large[section]
    assert factory["training"].items() <= large["training"].items()


def test_its_step_is_not_larger_than_its_tasks() -> None:
    config = load(RECIPES / "train32b.toml")
    assert config.training is not None
    assert len(taskset.load(config.tasks, "train")) >= config.training.groups
