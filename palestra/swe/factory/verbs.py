"""`palestra factory make` and `prove`."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palestra import sandboxes
from palestra.config import BubblewrapSandbox
from palestra.errors import UsageError
from palestra.message import JSON
from palestra.sandbox.opening import make_provider
from palestra.swe.factory import making, proving, recipe
from palestra.swe.factory.packages import PACKAGES, find


async def make(console: Console, path: Path, names: Sequence[str], each: int, seed: int) -> dict[str, JSON]:
    """Make a task set of up to `each` tasks of every package named, or of all that bugs are made of."""
    if each < 1:
        raise UsageError(f"--each {each}: give the number of tasks of a package, 1 or more")
    names = names or [name for name, package in PACKAGES.items() if package.bugs]
    recipes: list[recipe.Recipe] = []
    tried: dict[str, JSON] = {}
    async with sandboxes.provided(lambda: make_provider(BubblewrapSandbox(kind="bubblewrap"))):
        for package in map(find, names):
            made = await making.make(package, each, seed, lambda said: console.print(said, markup=False))
            recipes += made.recipes
            tried[package.name] = dict(made.tried)
    recipe.write(path, recipes, {"seed": seed, "each": each})
    console.print(f"{len(recipes)} tasks of {len(tried)} packages in {path}", markup=False)
    return {"tasks": len(recipes), "tried": tried}


async def prove(console: Console, path: Path, sample: int, forged: int, seed: int) -> dict[str, JSON]:
    """Compare the few tests of a sample of tasks with the whole suites, and play the forgeries on `forged` tasks."""
    if sample < 1:
        raise UsageError(f"--sample {sample}: give the number of tasks, 1 or more")
    async with sandboxes.provided(lambda: make_provider(BubblewrapSandbox(kind="bubblewrap"))):
        recipes = recipe.read(path)
        proof = await proving.prove(recipes, sample, seed, lambda said: console.print(said, markup=False))
        await proving.play_forgeries(recipes, forged, seed, proof)
    console.print(
        f"{proof.tasks} tasks: in {proof.held} their tests do the same in the whole suite; of {proof.wrong} wrong fixes that the "
        f"whole suite notices, they notice {proof.noticed}"
    )
    for name, counts in proof.forgeries.items():
        console.print(
            f"forged {name}: {counts['tried']} tried, {counts['seemed']} seemed to pass, "
            f"{counts['found_out']} of them found out, {counts['rewarded']} rewarded"
        )
    return proof.to_json()
