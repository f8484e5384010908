"""A sandbox with a coding agent's tools: the environment of a task that is solved in a folder."""

from collections.abc import Callable

from palestra.protocols import Sandbox
from palestra.tool import Finish
from palestra.tools.code import CodeIndex, CodeSearch
from palestra.tools.edit import Editor
from palestra.tools.shell import Shell


class Workspace:
    """Take all `tools()`, or single ones: `workspace.shell.bash`, `workspace.editor.view`."""

    def __init__(self, sandbox: Sandbox, folder: str | None = None, search: CodeSearch | None = None) -> None:
        """The folder is the sandbox's own when not given."""
        self.sandbox, self.folder, self.search = sandbox, folder or sandbox.folder, search
        self.shell, self.editor = Shell(sandbox, self.folder), Editor(sandbox, self.folder)
        self._base: str | None = None

    @classmethod
    async def open(cls, sandbox: Sandbox, folder: str | None = None, index: CodeIndex | None = None) -> "Workspace":
        """The tools on a folder that is all set up, with code search where there is an index of what it began as. In a git
        repository its present commit is what changes are told from."""
        search = None if index is None else CodeSearch.in_sandbox(sandbox, folder or sandbox.folder, index)
        workspace = cls(sandbox, folder, search)
        workspace._base = await workspace._git("rev-parse", "HEAD")
        return workspace

    def tools(self) -> list[Callable[..., object]]:
        editor = self.editor
        search = [] if self.search is None else self.search.tools()
        return [self.shell.bash, editor.view, editor.edit, editor.create, editor.undo, *search, self.finish]

    async def finish(self, answer: str = "") -> Finish:
        """End the work, when it is done and checked.

        Args:
            answer: what was done, in a sentence or two
        """
        return Finish(answer, changed=await self.changed())

    async def changed(self) -> bool | None:
        """Whether files differ from what they were at the beginning; None where that cannot be told, without git."""
        if self._base is None:
            return None
        differs = await self._git("diff", "--name-only", self._base, "--")
        added = await self._git("ls-files", "--others", "--exclude-standard")
        return None if differs is None or added is None else bool(differs or added)

    async def _git(self, *words: str) -> str | None:
        ran = await self.sandbox.run(["git", *words], folder=self.folder, seconds=30)
        return None if ran.code else ran.stdout.head.decode(errors="replace").strip()
