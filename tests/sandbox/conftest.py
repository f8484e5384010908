"""Providers of sandboxes as fixtures, with a cache folder that the tests share."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palestra.protocols import Sandboxes
from palestra.sandbox import native
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.container import Container
from palestra.sandbox.limits import ALL, Limits, Protections
from palestra.sandbox.local import Local

pytest.register_assert_rewrite(*(f"sandbox.attacks_{topic}" for topic in ("files", "kernel", "network", "processes")))

LIMITS = Limits(memory=128 * 2**20, disk=64 * 2**20, inodes=8192, processes=64)
NO_BWRAP = None if shutil.which("bwrap") else "bwrap is not installed"
NO_IMAGE = None if os.environ.get("PALESTRA_TEST_IMAGE") else "PALESTRA_TEST_IMAGE names no container image to try"
ABSENT = {"bubblewrap": NO_BWRAP, "slow": NO_BWRAP, "container": NO_IMAGE, "local": None}
"""Why a provider cannot be tried here. The slow one is bubblewrap without the compiled supervisor."""


def make_provider(kind: str, limits: Limits, cache: Path, protections: Protections = ALL) -> Sandboxes:
    if reason := ABSENT[kind]:
        pytest.skip(reason)
    if kind == "local":
        return Local()
    if kind == "container":
        engine, options = (os.environ.get(f"PALESTRA_TEST_{name}", "").split() for name in ("ENGINE", "OPTIONS"))
        return Container(os.environ["PALESTRA_TEST_IMAGE"], limits, engine, options)
    return Bubblewrap(limits, cache=cache, protections=protections, engine=native.SLOW if kind == "slow" else None)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox-cache")


@pytest.fixture(params=list(ABSENT))
async def provider(request: pytest.FixtureRequest, cache: Path) -> AsyncIterator[Sandboxes]:
    """Each provider that runs here."""
    made = make_provider(request.param, LIMITS, cache)
    yield made
    await made.close()
