"""Making a task set: survey a package, try seeded changes of its functions, keep those that break tests which passed before.
Every task is proven as it is made: its tests fail with the change and pass without, and right code fails its canaries.
"""

import ast
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from palestra.swe.factory.edit import Edit, apply
from palestra.swe.factory.mutations import Mutation, functions, mutations
from palestra.swe.factory.packages import Package, is_test, python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.statement import shown_lines, statement
from palestra.swe.factory.trials import Bench, Result, Survey, Told, Trial, bench
from palestra.swe.factory.twists import reads_naturally, twist

BATCH = 20
TRIAL_SECONDS = 45.0
"""By the clock, for what waits for ever. What computes for ever is stopped long before."""
MOST_CALLERS = 250
"""A function that more tests call is too central: to try it takes long, and breaking it breaks everything."""
MOST_BROKEN = 40
PER_FUNCTION = 3
FAILS, PASSES, CANARIES = 16, 16, 4
"""So many tests of each kind grade a task."""
ROUNDS = 4
"""Ways to turn a test round that are tried before it is given up."""


@dataclass
class Made:
    recipes: list[Recipe] = field(default_factory=list)
    tried: Counter[str] = field(default_factory=Counter)
    """What became of each change that was tried."""

    def of(self, mutation: Mutation) -> int:
        """How many tasks are about the same function."""
        return sum((each.edit.path, each.symbol) == (mutation.edit.path, mutation.symbol) for each in self.recipes)


@dataclass(frozen=True)
class Hidden:
    """What a maker knows of a package's tests."""

    survey: Survey
    files: Mapping[str, bytes]
    twists: Mapping[str, Edit]
    """For each test that can be turned round, how; proven."""


async def make(package: Package, count: int, seed: int, say: Callable[[str], None]) -> Made:
    """Up to `count` tasks of a package."""
    files = python_files(package.name)
    chance = random.Random(f"{seed}/{package.name}")
    made = Made()
    async with bench(package) as trials:
        survey = await trials.survey(without=timekeepers(files))
        hidden = Hidden(survey, files, await proven_twists(trials, survey, files))
        say(f"{package.name}: {len(survey.passing)} tests pass, {len(hidden.twists)} can be turned round")
        waiting = candidates(package, files, survey, chance)
        seen: set[object] = set()
        while len(made.recipes) < count and (waiting := [each for each in waiting if made.of(each) < PER_FUNCTION]):
            batch, waiting = waiting[:BATCH], waiting[BATCH:]
            results = await trials.run([_trial(mutation, survey) for mutation in batch])
            sure = len(made.recipes)
            for mutation, result in zip(batch, results, strict=True):
                if len(made.recipes) < count:
                    made.tried[_judge(package, mutation, result, hidden, seen, made, chance)] += 1
            made.recipes[sure:] = await _proven(trials, made.recipes[sure:], made.tried)
            say(f"{package.name}: {len(made.recipes)} tasks, {dict(made.tried)}")
    made.recipes = [replace(recipe, id=f"{package.name}-{number:04d}") for number, recipe in enumerate(made.recipes)]
    return made


def timekeepers(files: Mapping[str, bytes]) -> set[str]:
    """Tests that look at a clock, which fail on a busy machine; without their cases."""
    return {
        f"{path}::{function.symbol.replace('.', '::')}"
        for path, data in files.items()
        if is_test(path) and b"time" in data
        for function in functions(ast.parse(data))
        if any(_tells_the_time(node) for node in ast.walk(function.node))
    }


def _tells_the_time(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time"))):
            return True
    return False


def candidates(package: Package, files: Mapping[str, bytes], survey: Survey, chance: random.Random) -> list[Mutation]:
    """Changes worth a trial, in a seeded order in which the kinds take turns."""
    by_kind: dict[str, list[Mutation]] = {}
    for path, data in files.items():
        if path.startswith(f"{package.code}/") and not is_test(path):
            for mutation in mutations(path, data):
                place = (path, mutation.line)
                if place not in survey.at_import and 0 < len(survey.callers.get(place, ())) <= MOST_CALLERS:
                    by_kind.setdefault(mutation.kind, []).append(mutation)
    for kind in sorted(by_kind):
        chance.shuffle(by_kind[kind])
    turns = itertools.zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    return [mutation for turn in turns for mutation in turn if mutation is not None]


def _trial(mutation: Mutation, survey: Survey) -> Trial:
    return Trial([mutation.edit], survey.callers[mutation.edit.path, mutation.line], TRIAL_SECONDS, MOST_BROKEN)


def _judge(
    package: Package,
    mutation: Mutation,
    result: Result,
    hidden: Hidden,
    seen: set[object],
    made: Made,
    chance: random.Random,
) -> str:
    """What became of a trial; a task is added where it gave one."""
    callers = hidden.survey.callers[mutation.edit.path, mutation.line]
    failed = [test for test in callers if test in result.failed]
    if len(failed) > MOST_BROKEN:
        return "breaks too much"
    if result.late or len(failed) + len(result.passed) < len(callers):
        return "hangs or breaks the run"
    if not failed:
        return "no test noticed"
    if made.of(mutation) >= PER_FUNCTION:
        return "enough of this function"
    changed = apply([mutation.edit], hidden.files)[mutation.edit.path]
    same = frozenset((test, result.failed[test].message) for test in failed)
    if same in seen or (code := ast.dump(ast.parse(changed))) in seen:
        return "the same as another"
    recipe = _recipe(package, mutation, failed, result, hidden, chance)
    if recipe is None:
        return "no canary"
    seen |= {same, code}
    made.recipes.append(recipe)
    return "kept"


async def _proven(trials: Bench, drafts: list[Recipe], tried: Counter[str]) -> list[Recipe]:
    """Those whose tests do just what is said of them when they run as a grader runs them: on the broken package, on the
    untouched one, and on that with tests turned round."""
    states = [edits for draft in drafts for edits in ([draft.edit], [], draft.twists)]
    graded = [draft.graded for draft in drafts for _ in range(3)]
    results = await trials.run([Trial(edits, tests, TRIAL_SECONDS) for edits, tests in zip(states, graded, strict=True)])
    proven: list[Recipe] = []
    for draft, broken, whole, turned in zip(drafts, results[::3], results[1::3], results[2::3], strict=True):
        fails = set(broken.failed).issuperset(draft.fails) and set(broken.passed).issuperset(draft.passes)
        if fails and set(whole.passed).issuperset(draft.graded) and set(turned.failed).issuperset(draft.canaries):
            proven.append(draft)
    tried.update({"kept": len(proven) - len(drafts), "other verdicts alone": len(drafts) - len(proven)})
    return proven


def _recipe(
    package: Package, mutation: Mutation, failed: list[str], result: Result, hidden: Hidden, chance: random.Random
) -> Recipe | None:
    chosen = min(failed, key=lambda test: (len(result.failed[test].message), test))
    told = result.failed[chosen]
    fails = _dealt(chosen, failed, chance)
    unseen = set(map(_file, fails))
    near = [test for test in hidden.survey.callers[mutation.edit.path, mutation.line] if test in result.passed][:PASSES]
    beside = [test for test in hidden.twists if _file(test) in unseen and test not in failed and test not in near]
    passes = near + chance.sample(beside, min(max(CANARIES, PASSES - len(near)), len(beside)))
    seen = shown_lines(hidden.files[told.path], told.line) if told.path in hidden.files else None
    turned = [test for test in [*fails, *passes] if _file(test) in unseen and test in hidden.twists]
    usable = [test for test in turned if _is_unseen(test, hidden, told, seen)]
    dealt = chance.sample(usable, len(usable))
    canaries = sorted(dealt, key=lambda test: not reads_naturally(hidden.twists[test]))[:CANARIES]
    if not canaries:
        return None
    test_file = hidden.files.get(told.path, b"")
    text = statement(f"{package.name} {package.source.archive.rpartition('-')[2]}", chosen, told, test_file, failed)
    return Recipe(
        "",
        package.name,
        mutation.kind,
        mutation.edit,
        mutation.symbol,
        mutation.lines,
        text,
        tuple(fails),
        tuple(passes),
        tuple(sorted({hidden.twists[test] for test in canaries}, key=lambda edit: (edit.path, edit.start))),
        tuple(canaries),
    )


def _dealt(chosen: str, failed: list[str], chance: random.Random) -> list[str]:
    """So many of the tests that failed, the chosen one first, and then one of every file: what notices is not to be seen."""
    others = [test for test in failed if test != chosen]
    dealt = [chosen, *chance.sample(others, len(others))]
    first = {_file(test): test for test in reversed(dealt)}
    return sorted(dealt, key=lambda test: first[_file(test)] != test)[:FAILS]


def _is_unseen(test: str, hidden: Hidden, told: Told, seen: tuple[int, int] | None) -> bool:
    """Whether turning a test round changes nothing that the problem statement shows: nobody must be able to tell."""
    edit = hidden.twists[test]
    line = hidden.files[edit.path][: edit.start].count(b"\n") + 1
    return edit.path != told.path or seen is None or not seen[0] <= line <= seen[1]


async def proven_twists(trials: Bench, survey: Survey, files: Mapping[str, bytes]) -> dict[str, Edit]:
    """A way to turn each test round, where there is one that makes the untouched package fail it."""
    ways = {_function(test): list(twist(_file(test), files.get(_file(test), b""), test)) for test in survey.passing}
    proven: dict[str, Edit] = {}
    for number in range(ROUNDS):
        wanted = {function for test in survey.passing if test not in proven for function in [_function(test)]}
        taken = {function: edits[number] for function, edits in ways.items() if function in wanted and len(edits) > number}
        tests = [test for test in survey.passing if test not in proven and _function(test) in taken]
        if not tests:
            break
        [result] = await trials.run([Trial(list(set(taken.values())), tests)])
        proven |= {test: taken[_function(test)] for test in tests if test in result.failed}
    return proven


def _function(test: str) -> str:
    return test.partition("[")[0]


def _file(test: str) -> str:
    return test.partition("::")[0]
