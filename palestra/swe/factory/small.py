"""Bugs for a very small model: the easiest of a set, the function at fault named, two tools in few words, worked examples. An
edit that goes through hands in. The sandbox, the hidden tests and the grader are those of every other bug.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palestra.message import JSON, Message, ToolCall, assistant, system, to_json, user
from palestra.swe.agent import Desk
from palestra.swe.factory.edit import apply
from palestra.swe.factory.packages import python_files
from palestra.swe.factory.recipe import Recipe
from palestra.swe.factory.task import BugFix
from palestra.tool import Finish, Toolbox
from palestra.tools.workspace import Workspace

LINES, STATEMENT = 25, 500
"""Of the broken function, and characters of the problem."""
KINDS = ("compare", "arithmetic", "boolean", "constant", "negate", "swap")
"""Changes within one line."""
EXAMPLES, SEEN = 2, 1600
"""Worked examples, and characters of an answer."""


def is_easy(recipe: Recipe) -> bool:
    """Whether the broken function is short, one line of it is to be changed, and nothing else in the file reads like it."""
    if recipe.kind not in KINDS or recipe.lines > LINES or len(recipe.statement) > STATEMENT:
        return False
    if "\n" in recipe.edit.old + recipe.edit.new:
        return False
    code = _Code(recipe)
    return "\n".join(code.broken).count(code.line_of(code.broken)) == 1


@dataclass(frozen=True)
class SmallBugFix(BugFix):
    examples: tuple[Recipe, ...] = ()

    def prompt(self, env: Desk | None) -> Sequence[Message]:
        look = "search_symbol" if self.search else "bash"
        told = system(f"Look at the function with {look}, then mend the wrong line with edit.")
        turns = [message for example in self.examples for message in _worked(example, self.search)]
        return [told, *turns, user(_problem(self.recipe))]

    def tools(self, env: Desk | None) -> Sequence[Callable[..., object]]:
        hand = _Hand(env)
        return [hand.search_symbol if self.search else hand.bash, hand.edit]

    def demonstration(self) -> dict[str, JSON]:
        """The bug mended, as a line of data for a warm start."""
        messages = [*self.prompt(None), *_worked(self.recipe, self.search)[1:]]
        return {"messages": [to_json(message) for message in messages], "tools": Toolbox(self.tools(None)).schemas()}


class _Hand:
    """The desk's tools, described in as few words as will do. Without a desk they can only be described."""

    def __init__(self, desk: Desk | None) -> None:
        self._given = desk

    @property
    def _desk(self) -> Workspace:
        assert self._given is not None
        return self._given.workspace

    async def search_symbol(self, name: str) -> str:
        """See a function.

        Args:
            name: such as Box.fill
        """
        assert self._desk.search is not None
        return (await self._desk.search.search_symbol(name))[:SEEN]

    async def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: such as ls
        """
        return (await self._desk.shell.bash(command))[:SEEN]

    async def edit(self, path: str, old: str, new: str) -> Finish:
        """Replace a line, and hand in.

        Args:
            path: the file
            old: the wrong line
            new: the right line
        """
        return Finish(await self._desk.editor.edit(path, old, new), changed=True)


def easy(recipes: Sequence[Recipe], search: bool, known: Sequence[Recipe], shown: int) -> list[SmallBugFix]:
    """The easy ones. The two easiest of those that are known are left out, and so many of them shown as worked examples."""
    easiest = sorted(filter(is_easy, known), key=lambda each: (len(each.statement) + len(_Code(each).text), each.id))
    examples = tuple({each.kind: each for each in reversed(easiest)}.values())[-EXAMPLES:]
    asked = [each for each in recipes if is_easy(each) and each not in examples]
    return [SmallBugFix(each.id, each, search, examples[EXAMPLES - shown :]) for each in asked]


def _problem(recipe: Recipe) -> str:
    return f"{recipe.statement}\n\nThe function at fault is {recipe.symbol} in {recipe.edit.path}."


class _Code:
    """The file of a bug, broken and right, and the function in it."""

    def __init__(self, recipe: Recipe) -> None:
        files, path = python_files(recipe.package), recipe.edit.path
        self.right = files[path].decode().split("\n")
        self.broken = apply([recipe.edit], files)[path].decode().split("\n")
        self.at = files[path][: recipe.edit.start].count(b"\n")
        """The line that differs, from 0."""
        name = recipe.symbol.rpartition(".")[2]
        self.start = next(at for at in range(self.at, -1, -1) if self.broken[at].strip().startswith((f"def {name}", "async def")))
        self.end = self.start + recipe.lines

    def line_of(self, lines: Sequence[str]) -> str:
        return lines[self.at].strip()

    @property
    def text(self) -> str:
        return "\n".join(self.broken[self.start : self.end])


def _worked(recipe: Recipe, search: bool) -> list[Message]:
    """A solution as turns: look, then edit."""
    code, path, name = _Code(recipe), recipe.edit.path, recipe.symbol.rpartition(".")[2]
    numbered = list(enumerate(code.broken[code.start : code.end], code.start + 1))
    if search:
        look = ToolCall("call_0", "search_symbol", {"name": recipe.symbol})
        kind = "method" if "." in recipe.symbol else "function"
        head = f"1 definition of {recipe.symbol!r}: {path}:{code.start + 1}-{code.end} {kind} {recipe.symbol}"
        seen = "\n".join([head, *(f"{number:>{len(str(code.end))}} {line}" for number, line in numbered)])
    else:
        look = ToolCall("call_0", "bash", {"command": f"grep -n -A {recipe.lines - 1} 'def {name}' {path}"})
        seen = "\n".join(f"{number}{'-' if number > code.start + 1 else ':'}{line}" for number, line in numbered)
    change = ToolCall("call_0", "edit", {"path": path, "old": code.line_of(code.broken), "new": code.line_of(code.right)})
    return [
        user(_problem(recipe)),
        assistant("", look),
        Message("tool", seen, name=look.name),
        assistant("", change),
    ]
