"""Whether the few tests of a task are enough: on a sample, the whole suite is run on the broken package and on wrong fixes of it,
and its verdict is compared with theirs. And whether forged passes are found out: on a smaller sample, each forgery is played.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from palestra.message import JSON
from palestra.swe.factory.forging import FORGERIES, forge
from palestra.swe.factory.mutations import mutations
from palestra.swe.factory.packages import find, python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.task import BugFix
from palestra.swe.factory.trials import Bench, Trial, bench

WRONG_FIXES = 2
"""For each task: other changes of the same function, in place of the one that broke it."""


@dataclass
class Proof:
    tasks: int = 0
    held: int = 0
    """Tasks whose tests fail and pass in the whole suite as they do alone."""
    wrong: int = 0
    """Wrong fixes that the whole suite notices."""
    noticed: int = 0
    """Of those, the ones that the few tests notice too."""
    missed: list[str] = field(default_factory=list)
    forgeries: dict[str, Counter[str]] = field(default_factory=dict)
    """For each: how often it was tried, seemed to pass every test, was found out by a test turned round, and was rewarded."""

    def to_json(self) -> dict[str, JSON]:
        return {
            "tasks": self.tasks,
            "held": self.held,
            "wrong": self.wrong,
            "noticed": self.noticed,
            "missed": self.missed,
            "forgeries": {name: dict(counts) for name, counts in self.forgeries.items()},
        }


async def prove(recipes: Sequence[Recipe], sample: int, seed: int, say: Callable[[str], None]) -> Proof:
    chance = random.Random(seed)
    chosen = chance.sample(recipes, min(sample, len(recipes)))
    proof = Proof()
    for package in sorted({recipe.package for recipe in chosen}):
        async with bench(find(package)) as trials:
            [untouched] = await trials.run([Trial((), None, warm=True)])
            for recipe in chosen:
                if recipe.package == package:
                    await _prove(recipe, trials, set(untouched.passed), proof, chance)
        say(f"{package}: {proof.to_json()}")
    return proof


async def play_forgeries(recipes: Sequence[Recipe], sample: int, seed: int, proof: Proof) -> None:
    chosen = random.Random(seed).sample(recipes, min(sample, len(recipes)))
    for recipe in chosen:
        for name, code in FORGERIES.items():
            score = await forge(BugFix(recipe.id, recipe), code)
            seemed = score.metrics.get("fails") == score.metrics.get("passes", 1.0) == 1.0
            counts = proof.forgeries.setdefault(name, Counter())
            counts.update(tried=1, seemed=seemed, found_out=seemed and score.reward == 0, rewarded=score.reward > 0)


async def _prove(recipe: Recipe, trials: Bench, passing: set[str], proof: Proof, chance: random.Random) -> None:
    path = recipe.edit.path
    every = mutations(path, python_files(recipe.package)[path])
    others = [each for each in every if each.symbol == recipe.symbol and each.edit != recipe.edit]
    wrong = chance.sample(others, min(WRONG_FIXES, len(others)))
    broken, *fixes = await trials.run([Trial([edit], None) for edit in (recipe.edit, *(each.edit for each in wrong))])
    proof.tasks += 1
    proof.held += set(broken.failed).issuperset(recipe.fails) and set(broken.passed).issuperset(recipe.passes)
    for each, result in zip(wrong, fixes, strict=True):
        failing = passing - set(result.passed)
        if failing and not result.late:
            proof.wrong += 1
            if failing.intersection((*recipe.fails, *recipe.passes)):
                proof.noticed += 1
            else:
                proof.missed.append(f"{recipe.id}: {each.edit.old[:40]!r} -> {each.edit.new[:40]!r}")
