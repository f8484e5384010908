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
        each
        for each in recipes
        if each.package == "toolz" and len(each.fails) > 1 and any("not (" not in twist.new for twist in each.twists)
    )
    return BugFix(chosen.id, chosen)
