"""The factory's task sets: bugs to mend, and places to find. Three packages are held out: no training task is about them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from palestra.swe.factory import localise, recipe
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.small import SmallBugFix, easy
from palestra.swe.factory.task import BugFix

SET = Path(__file__).parent / "factory.jsonl.gz"
HELD_OUT = ("pathspec", "sqlparse", "voluptuous")
TO_SEARCH = ("boltons", "cachetools", "mistune", "tomlkit", "toolz")
"""Of the others, those with code in more than one file."""


@cache
def recipes() -> list[Recipe]:
    return recipe.read(SET)


def bugs(heldout: bool, search: bool = True, lines: int | None = None) -> list[BugFix]:
    """Of the functions that have at most so many lines, where that is given."""
    return [
        BugFix(each.id, each, search)
        for each in recipes()
        if (each.package in HELD_OUT) == heldout and (lines is None or each.lines <= lines)
    ]


def train(search: bool = True, lines: int | None = None, first: int | None = None) -> Sequence[BugFix]:
    return bugs(False, search, lines)[:first]


def heldout(search: bool = True, lines: int | None = None, first: int | None = None) -> Sequence[BugFix]:
    return bugs(True, search, lines)[:first]


def find_train(search: bool = True) -> Sequence[localise.Definition]:
    return localise.definitions(TO_SEARCH, search=search)


def find_heldout(search: bool = True) -> Sequence[localise.Definition]:
    return localise.definitions(HELD_OUT, search=search)


def faults_train(search: bool = True) -> Sequence[localise.Fault]:
    return localise.faults([each for each in recipes() if each.package not in HELD_OUT], search)


def faults_heldout(search: bool = True) -> Sequence[localise.Fault]:
    return localise.faults([each for each in recipes() if each.package in HELD_OUT], search)


def small_train(search: bool = True, shown: int = 2) -> Sequence[SmallBugFix]:
    known = [each for each in recipes() if each.package not in HELD_OUT]
    return easy(known, search, known, shown)


def small_heldout(search: bool = True, shown: int = 2) -> Sequence[SmallBugFix]:
    known = [each for each in recipes() if each.package not in HELD_OUT]
    return easy([each for each in recipes() if each.package in HELD_OUT], search, known, shown)
