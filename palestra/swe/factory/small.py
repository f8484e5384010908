"""Bugs for a very small model: the easiest of a set, with three tools and worked examples in a short prompt. The sandbox, the
hidden tests and the grader are those of every other bug.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.message import Message, ToolCall, assistant, system, user
from palestra.swe.agent import Desk
from palestra.swe.factory.edit import Text, apply
from palestra.swe.factory.packages import python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.task import BugFix

LINES, STATEMENT = 40, 700
"""Of the broken function, and characters of the problem."""
KINDS = ("compare", "arithmetic", "boolean", "constant", "negate", "swap")
"""Changes within one line."""
SHOWN = 2


def is_easy(recipe: Recipe) -> bool:
    """Whether the broken function is short and named in the problem, and one line of it is to be changed."""
    name = recipe.symbol.rpartition(".")[2]
    line = _lines(recipe)
    return (
        recipe.kind in KINDS
        and recipe.lines <= LINES
        and len(recipe.statement) <= STATEMENT
        and re.search(rf"\b{re.escape(name)}\b", recipe.statement) is not None
        and line is not None
    )


@dataclass(frozen=True)
class SmallBugFix(BugFix):
    examples: tuple[Recipe, ...] = ()

    def prompt(self, env: Desk) -> Sequence[Message]:
        look = "search_symbol" if self.search else "bash"
        told = system(f"Look at the broken function with {look}, mend it with edit, then call finish.")
        turns = [message for example in self.examples for message in _worked(example, self.search)]
        return [told, *turns, user(self.recipe.statement)]

    def tools(self, env: Desk) -> Sequence[Callable[..., object]]:
        ours = env.workspace
        return [ours.search.search_symbol if ours.search else ours.shell.bash, ours.editor.edit, ours.finish]


def easy(recipes: Sequence[Recipe], search: bool, shown: Sequence[Recipe]) -> list[SmallBugFix]:
    """The easy ones, with worked examples from among `shown`, which are left out."""
    examples = tuple(sorted(filter(is_easy, shown), key=lambda each: (len(each.statement), each.id))[:SHOWN])
    return [SmallBugFix(each.id, each, search, examples) for each in recipes if is_easy(each) and each not in examples]


def _lines(recipe: Recipe) -> tuple[str, str] | None:
    """The broken line and the right one, where one line is all that differs."""
    files = python_files(recipe.package)
    path = recipe.edit.path
    number = files[path][: recipe.edit.start].count(b"\n") + 1
    if "\n" in recipe.edit.old + recipe.edit.new:
        return None
    return Text(apply([recipe.edit], files)[path]).line(number).strip(), Text(files[path]).line(number).strip()


def _worked(recipe: Recipe, search: bool) -> list[Message]:
    """A solution as turns: look, edit, finish."""
    lines = _lines(recipe)
    assert lines is not None
    path, (broken, right) = recipe.edit.path, lines
    name = recipe.symbol.rpartition(".")[2]
    if search:
        look = ToolCall("call_0", "search_symbol", {"name": name})
    else:
        look = ToolCall("call_0", "bash", {"command": f"grep -rn -A {recipe.lines} 'def {name}' --include=*.py ."})
    change = ToolCall("call_0", "edit", {"path": path, "old": broken, "new": right})
    return [
        user(recipe.statement),
        assistant("", look),
        Message("tool", f"{path}\n{_code(recipe)}", name=look.name),
        assistant("", change),
        Message("tool", f"{path} is edited.", name="edit"),
        assistant("", ToolCall("call_0", "finish", {"answer": "mended"})),
    ]


def _code(recipe: Recipe) -> str:
    """The broken function."""
    files = python_files(recipe.package)
    text = Text(apply([recipe.edit], files)[recipe.edit.path])
    at = files[recipe.edit.path][: recipe.edit.start].count(b"\n") + 1
    name = recipe.symbol.rpartition(".")[2]
    start = next(number for number in range(at, 0, -1) if text.line(number).strip().startswith(f"def {name}"))
    return "\n".join(f"{number} {text.line(number)}" for number in range(start, start + recipe.lines))
