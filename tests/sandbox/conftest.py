"""Providers of sandboxes as fixtures, with a cache folder that the tests share."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palestra.protocols import Sandboxes
from palestra.sandbox import native
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.limits import Limits
from palestra.sandbox.local import Local

pytest.register_assert_rewrite(*(f"sandbox.attacks_{topic}" for topic in ("files", "kernel", "network", "processes")))

LIMITS = Limits(memory=128 * 2**20, disk=64 * 2**20, inodes=8192, processes=64)
NO_BWRAP = None if shutil.which("bwrap") else "bwrap is not installed"
ABSENT = {"bubblewrap": NO_BWRAP, "slow": NO_BWRAP, "local": None}
"""Why a provider cannot be tried here. The slow one is bubblewrap without the compiled supervisor."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox-cache")


@pytest.fixture(params=list(ABSENT))
async def provider(request: pytest.FixtureRequest, cache: Path) -> AsyncIterator[Sandboxes]:
    """Each provider that runs here."""
    if reason := ABSENT[request.param]:
        pytest.skip(reason)
    slow = native.SLOW if request.param == "slow" else None
    made: Sandboxes = Local() if request.param == "local" else Bubblewrap(LIMITS, cache=cache, engine=slow)
    yield made
    await made.close()
