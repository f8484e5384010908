"""The releases that tasks are made of, pinned by digest, and pytest for them, pinned too. Each has tests in its source archive,
needs nothing but the standard library, and runs them offline in seconds.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from palestra.errors import UsageError, nearest
from palestra.sources import Source, fetch, installed

LOCK = Path(__file__).parent / "pytest.txt"


@dataclass(frozen=True)
class Package:
    source: Source
    code: str
    """The folder of its code: all that a fix may change."""
    bugs: bool = True
    """Whether bugs are made of it, unless it is named: its tests are quick, and do the same on a busy machine."""

    @property
    def name(self) -> str:
        return self.source.project

    @property
    def root(self) -> str:
        """What must be on Python's path."""
        return os.path.dirname(self.code)

    def folder(self) -> Path:
        """The unpacked release, on this machine; downloaded when it is not there."""
        return fetch(self.source)


def _package(archive: str, sha256: str, code: str, bugs: bool = True) -> Package:
    return Package(Source(archive.rpartition("-")[0].replace("_", "-"), archive, sha256), code, bugs)


PACKAGES = {
    package.name: package
    for package in (
        _package("boltons-26.2.0", "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c", "boltons", False),
        _package("cachetools-8.0.0", "5ed01bd676800d51f0025605e4fd8ad0891550513e7b0a4c3da478463764e5c3", "src/cachetools"),
        _package("mistune-3.4.0", "2eaf7952af928ca8d33b779762effc1da517b62c6ad85ec8ca957e3b07b9782a", "src/mistune", False),
        _package("pathspec-1.1.1", "17db5ecd524104a120e173814c90367a96a98d07c45b2e10c2f3919fff91bf5a", "pathspec"),
        _package("schema-0.7.8", "e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5", "schema"),
        _package("sqlparse-0.6.1", "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7", "sqlparse"),
        _package("tabulate-0.10.0", "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d", "tabulate"),
        _package("tomlkit-0.15.2", "83e32755ba1d20d9340bd069ee97e9f6232ba2346b63ffcba425de01f7e327a6", "tomlkit"),
        _package("toolz-1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490", "toolz"),
        _package("voluptuous-0.16.0", "006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05", "voluptuous"),
    )
}


def find(name: str) -> Package:
    if name not in PACKAGES:
        raise UsageError(f"no package {name!r} in the factory{nearest(name, PACKAGES)}")
    return PACKAGES[name]


@cache
def python_files(name: str) -> dict[str, bytes]:
    """All Python files of a release, tests too, by their path in it."""
    folder = find(name).folder()
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith("test") or name == "conftest.py" or bool({"test", "tests"} & set(folders))


def pytest_folder() -> Path:
    """pytest and what it needs, installed once."""
    return installed(LOCK, "pytest for the factory's packages")
