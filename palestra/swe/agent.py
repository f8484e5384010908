"""The agent that mends code: bash, an editor, code search and finish on one repository, and what it is told about them. What it
is told toward the end of its turns or its context, and when it goes astray, is `agent.remind` and `[hints]` of the config.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from palestra import sandboxes
from palestra.message import Message, system, user
from palestra.protocols import Sandbox, Snapshot
from palestra.swe import grading
from palestra.tools.code import CodeIndex, CodeSearch
from palestra.tools.workspace import Workspace

WORK = """You are a software engineer. A repository with a defect is in {folder}; nothing outside it matters. There is no network.
Find the cause of the problem, mend it in the repository's own code with as small a change as will do, check it, and call finish.
Tests that you cannot see judge the change. They replace the test files, so changing tests or settings counts for nothing."""

SEARCH = """Begin with search: search_symbol shows where a name is defined, with its code; find_references who uses it; \
file_outline what a file holds. That takes fewer turns and tokens than listing and reading files."""

NO_SEARCH = """Look for names with grep in bash before you read files."""


@dataclass(frozen=True)
class Desk:
    """What one attempt works with."""

    workspace: Workspace
    commit: str
    """What its changes are told from."""

    @property
    def folder(self) -> str:
        return self.workspace.folder

    def tools(self) -> list[Callable[..., object]]:
        return self.workspace.tools()

    async def diff(self) -> str:
        return await grading.harvest(self.workspace.sandbox, self.folder, self.commit)


async def sit_down(sandbox: Sandbox, folder: str, search: bool, index: CodeIndex | None = None) -> Desk:
    """Make the folder, as it is now, the repository that an agent begins with. `index` is that of the same files on this machine,
    where there is one."""
    return await _desk(sandbox, folder, await grading.begin(sandbox, folder), search, index)


async def sit_down_again(stack: AsyncExitStack, snapshot: Snapshot, folder: str, index: CodeIndex | None) -> Desk:
    """In a sandbox whose snapshot has the repository that an agent begins with; with search where there is an index of it."""
    sandbox = await stack.enter_async_context(sandboxes.open(snapshot))
    return await _desk(sandbox, folder, await grading.beginning(sandbox, folder), index is not None, index)


async def _desk(sandbox: Sandbox, folder: str, commit: str, search: bool, index: CodeIndex | None) -> Desk:
    workspace = await Workspace.open(sandbox, folder)
    workspace.search = CodeSearch.in_sandbox(sandbox, folder, index) if search else None
    return Desk(workspace, commit)


def prompt(desk: Desk, problem: str, more: str = "") -> Sequence[Message]:
    """What the agent is told first: its work, where to begin, and the problem."""
    guidance = [WORK.format(folder=desk.folder), SEARCH if desk.workspace.search else NO_SEARCH, *([more] if more else [])]
    return [system("\n\n".join(guidance)), user(problem)]
