"""Tasks of the real set, in real sandboxes."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palestra import sandboxes
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.swe.factory import recipe
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.task import BugFix
from palestra.swe.factory.twists import reads_naturally

SET = Path(__file__).parents[3] / "recipes" / "swe" / "factory.jsonl.gz"
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")


@pytest.fixture(scope="session")
def recipes() -> list[Recipe]:
    return recipe.read(SET)


@pytest.fixture
async def provider() -> AsyncIterator[None]:
    async with sandboxes.provided(Bubblewrap):
        yield


@pytest.fixture(scope="session")
def bug(recipes: list[Recipe]) -> BugFix:
    """A bug that several tests notice, and whose task has a test turned round by its expected value."""
    chosen = next(
        each for each in recipes if each.package == "toolz" and len(each.fails) > 1 and any(map(reads_naturally, each.twists))
    )
    return BugFix(chosen.id, chosen)


@pytest.fixture(scope="session")
def unittest_bug(recipes: list[Recipe]) -> BugFix:
    """A bug of a package whose tests are classes of unittest."""
    chosen = next(each for each in recipes if each.package == "cachetools" and all("Test" in test for test in each.fails))
    return BugFix(chosen.id, chosen)
