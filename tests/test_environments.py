"""Environments: made whole or not at all, shared by checkouts, entered by the same command. A real one is made here, of a package
that was built on the spot, so no network is needed."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from palestra import environments
from palestra.environments import ENVIRONMENTS, Environment
from palestra.errors import UsageError

ROOT = Path(__file__).parents[1]


def _wheel(folder: Path, code: str) -> None:
    """A package `greeting` 1.0 that pip can install from its folder."""
    folder.mkdir(exist_ok=True)
    info = "greeting-1.0.dist-info"
    files = {
        "greeting.py": code,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


class Local(Environment):
    """Its lock lies in the test's folder."""

    @property
    def lock(self) -> Path:
        return Path(os.environ["PALESTRA_CACHE"]) / "lock.txt"


@pytest.fixture
def greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    # What Palestra itself needs is borrowed from here: this test is not about downloading it again.
    monkeypatch.setenv("PYTHONPATH", str(Path(importlib.metadata.distribution("pydantic").locate_file(""))))
    (tmp_path / "lock.txt").write_text("greeting==1.0\n")
    (tmp_path / "palestra.txt").write_text("")
    monkeypatch.setattr(environments, "_OWN_LOCK", tmp_path / "palestra.txt")
    environment = Local("greeting", ("greeting",), ("greeting",), "greets")
    monkeypatch.setitem(ENVIRONMENTS, "greeting", environment)
    return environment


def test_it_is_made_once_and_runs_this_very_package(greeting: Environment, tmp_path: Path) -> None:
    _wheel(tmp_path / "wheels", "words = 'good morning'\n")
    assert not greeting.installed
    environments.install(greeting)
    environments.install(greeting)
    assert greeting.installed
    assert greeting.versions() == {"greeting": "1.0"}
    code = "import sys, greeting, palestra, json; print(json.dumps([greeting.words, palestra.__file__, sys.prefix]))"
    done = subprocess.run(
        [greeting.python, "-c", code],
        env=environments.variables(greeting),
        cwd=tmp_path,  # and not where Python would find the package anyway
        capture_output=True,
        text=True,
        check=True,
    )
    words, package, prefix = json.loads(done.stdout)
    assert (words, Path(prefix)) == ("good morning", greeting.folder)
    assert Path(package).resolve().parent == ROOT / "palestra"


@pytest.mark.parametrize("code", [None, "raise RuntimeError('half done')\n"], ids=["no such package", "does not import"])
def test_a_broken_installation_is_never_taken_for_a_good_one(greeting: Environment, tmp_path: Path, code: str | None) -> None:
    if code is not None:
        _wheel(tmp_path / "wheels", code)
    with pytest.raises(UsageError, match="the environment for 'greeting' was not made"):
        environments.install(greeting)
    assert not greeting.installed
    with pytest.raises(UsageError, match="palestra backends install greeting"):
        environments.require("greeting")
    _wheel(tmp_path / "wheels", "")
    environments.install(greeting)
    assert greeting.installed


def test_another_lock_is_another_environment(greeting: Environment) -> None:
    before = greeting.folder
    greeting.lock.write_text("greeting==1.1\n")
    assert greeting.folder != before


def test_the_process_is_replaced_once(greeting: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    greeting.folder.mkdir(parents=True)
    (greeting.folder / "ready").touch()
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    environments.enter("greeting", ["train", "x.toml"])
    [(program, words, variables)] = calls
    assert program == greeting.python
    assert words == [str(greeting.python), "-m", "palestra", "train", "x.toml"]
    monkeypatch.setattr(os, "environ", variables)  # as in the process that took its place, if it were another Python after all
    with pytest.raises(UsageError, match="needs its own environment"):
        environments.enter("greeting", ["train", "x.toml"])
    monkeypatch.setattr(sys, "prefix", str(greeting.folder))
    environments.enter("greeting", ["train", "x.toml"])
    environments.enter(None, [])
    assert len(calls) == 1


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(UsageError, match=r"no environment 'tinkr'; did you mean 'tinker'\?"):
        environments.find("tinkr")


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=list(ENVIRONMENTS))
def test_every_lock_is_fully_pinned_and_has_what_palestra_needs(environment: Environment) -> None:
    locks = environment.lock.read_text() + environment.lock.with_name("palestra.txt").read_text()
    lines = [line for line in locks.splitlines() if line and not line.startswith("#")]
    pins = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines}
    assert len(pins) == len(lines)
    assert pins.get("torch", "2.13.0") == "2.13.0"
    assert environment.versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in map(Requirement, [*project["dependencies"], "pytest", "pytest-asyncio"]):
        assert needed.specifier.contains(pins[needed.name], prereleases=True), f"{needed} in {environment.lock.name}"
