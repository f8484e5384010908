"""A real server for these tests, on a port of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bridges.tinker.local_server import RECIPE, Server, free_port

from palestra import config
from palestra.backends.tinker.serving import bridge_typed_dict
from palestra.config import Config

bridge_typed_dict()  # before a test imports anything of skyrl's


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, str(RECIPE / "make_model.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model, tmp_path_factory.mktemp("server"), free_port())
    running.start()
    yield running
    running.stop()


@pytest.fixture
def recipe(server: Server, tmp_path: Path) -> Callable[..., Config]:
    """The recipe's config for this server, with further overrides."""

    def load(*overrides: str) -> Config:
        here = [f"run.folder={tmp_path / 'run'}", f"backend.model={server.model}", f"backend.base_url={server.address}"]
        return config.load(RECIPE / "tinker.toml", [*here, *overrides])

    return load
