"""These tests run in SkyRL's own environment: make test-backends."""

import importlib.util
from pathlib import Path

import pytest

import palestra.bridges.skyrl_train  # noqa: F401  # before anything of SkyRL's: it repairs what that trips over
from palestra.config import Config, load

RECIPE = Path(__file__).parents[3] / "recipes" / "bridges"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its warm start; from the cache where it was made before."""
    spec = importlib.util.spec_from_file_location("make_model", RECIPE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    made.make(folder)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    return configured(model, tmp_path / "run")


def configured(model: Path, folder: Path, *overrides: str) -> Config:
    return load(RECIPE / "train.toml", ["backend.kind=skyrl", f'backend.model="{model}"', f'run.folder="{folder}"', *overrides])
