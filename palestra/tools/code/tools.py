"""Code search as an agent's tools. Each answer fits a budget of characters, names the true count first and the best hits next,
and is never empty: where nothing is defined by a name, the closest names and the lines that mention it are told."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from palestra.protocols import Sandbox
from palestra.tools.code import names, report, text
from palestra.tools.code.files import inside
from palestra.tools.code.index import CodeIndex
from palestra.tools.code.sandboxed import SandboxFiles
from palestra.tools.code.symbols import Kind, Lines, Symbol


class _Place(Protocol):
    """Where the files are: brought up to date before each question, and searched for text."""

    async def refresh(self) -> None: ...

    async def search(self, pattern: str, path: str, fixed: bool, ignore_case: bool) -> Lines: ...


class _Folder:
    """A folder of this machine, whose index looks for changes itself."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def refresh(self) -> None: ...

    async def search(self, pattern: str, path: str, fixed: bool, ignore_case: bool) -> Lines:
        return await asyncio.to_thread(text.search_folder, self._root, pattern, path, fixed, ignore_case)


class CodeSearch:
    """The search tools of one rollout: give `tools()` to the agent."""

    def __init__(self, index: CodeIndex, place: _Place | None = None, root: str | None = None, budget: int = 6_000) -> None:
        self._index = index
        self._place = place or _Folder(index.root)
        self._root = root or str(index.root)
        self._budget = budget

    @staticmethod
    def in_sandbox(sandbox: Sandbox, root: str, index: CodeIndex | None = None, budget: int = 6_000) -> "CodeSearch":
        """Search in a sandbox whose folder `root` was made from the folder of `index`, which all its rollouts share. Without
        `index`, the first question reads every source file through the sandbox."""
        files = SandboxFiles(sandbox, root, index.files if index else None)
        return CodeSearch(index.over(files) if index else CodeIndex.without_base(files, Path(root)), files, root, budget)

    def tools(self) -> list[Callable[..., object]]:
        return [self.search_symbol, self.find_references, self.file_outline, self.search_text, self.get_dependencies]

    async def search_symbol(self, name: str, kind: Kind | None = None, path: str | None = None) -> str:
        """Find where a class, function, method or variable is defined, and see its code. Prefer this to grep.

        Args:
            name: its name, plain or qualified, such as aggregate or QuerySet.aggregate
            kind: only definitions of this kind
            path: only definitions in this file or folder
        """
        names.normal(name)
        return await self._answer(lambda: self._defined(name, kind, self._inside(path)))

    async def find_references(self, name: str, path: str | None = None) -> str:
        """Find the places in the code where a name is called, imported, subclassed or used otherwise, each with the class or
        function around it.

        Args:
            name: the name of a class, function, method or variable
            path: only places in this file or folder
        """
        names.normal(name)
        return await self._answer(lambda: self._referred(name, self._inside(path)))

    async def file_outline(self, path: str) -> str:
        """List the classes, functions, methods and variables of a file with their lines.

        Args:
            path: the file
        """
        return await self._answer(lambda: report.outline(path, self._index.outline(self._inside(path)), self._budget))

    async def search_text(self, pattern: str, path: str | None = None, literal: bool = False, ignore_case: bool = False) -> str:
        """Search the lines of all text files for a regular expression.

        Args:
            pattern: the regular expression
            path: only in this file or folder
            literal: take the pattern as plain text
            ignore_case: take capital and small letters as the same
        """
        text.check(pattern)
        lines = await self._place.search(pattern, self._inside(path), literal, ignore_case)
        return report.lines(f"matching {pattern!r}", lines.found, lines.count, self._budget)

    async def get_dependencies(self, path: str) -> str:
        """List what a file imports, and which files import it.

        Args:
            path: the file
        """
        return await self._answer(lambda: report.dependencies(path, *self._index.dependencies(self._inside(path)), self._budget))

    async def _answer(self, question: Callable[[], str]) -> str:
        await self._place.refresh()
        return await asyncio.to_thread(question)  # the first question after many edits may take a while

    def _inside(self, path: str | None) -> str:
        return inside(path, self._root) if path else ""

    def _defined(self, name: str, kind: Kind | None, path: str) -> str:
        found = report.ranked(self._index.symbol(name, kind, path), name)
        if not found:
            return self._absent(name, kind, path)
        subclasses = self._index.subclasses(found[0].name) if len(found) == 1 and found[0].kind == "class" else []
        return report.definitions(name, found, subclasses, self._index, self._budget)

    def _absent(self, name: str, kind: Kind | None, path: str) -> str:
        elsewhere: Sequence[Symbol] = self._index.symbol(name) if kind or path else ()
        word = names.normal(name).rpartition(".")[2]
        mentions = self._index.mentions(word) if word else []
        return report.absent(
            name, kind, path, len(self._index), report.ranked(elsewhere, name), self._index.closest(name), mentions, self._budget
        )

    def _referred(self, name: str, path: str) -> str:
        found = [each for each in self._index.references(name) if not path or f"{each.path}/".startswith(f"{path}/")]
        return report.references(name, found, self._budget) if found else self._absent(name, None, path)
