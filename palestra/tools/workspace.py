"""A sandbox with a coding agent's tools: the environment of a task that is solved in a folder."""

from collections.abc import Callable

from palestra.protocols import Sandbox
from palestra.tool import Finish
from palestra.tools.edit import Editor
from palestra.tools.shell import Shell


class Workspace:
    """Take all `tools()`, or single ones: `workspace.shell.bash`, `workspace.editor.view`."""

    def __init__(self, sandbox: Sandbox, folder: str) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.shell, self.editor = Shell(sandbox, folder), Editor(sandbox, folder)
        self._base: str | None = None

    @classmethod
    async def open(cls, sandbox: Sandbox, folder: str) -> "Workspace":
        """The tools on a folder that is all set up. In a git repository its present commit is what changes are told from."""
        workspace = cls(sandbox, folder)
        workspace._base = await workspace._git("rev-parse", "HEAD")
        return workspace

    def tools(self) -> list[Callable[..., object]]:
        editor = self.editor
        return [self.shell.bash, editor.view, editor.edit, editor.create, editor.undo, self.finish]

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
