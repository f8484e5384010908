"""From an agent's sandbox to a fresh one: its diff is taken out, and only what is allowed of it is put into a sandbox that it
never saw, where the hidden tests are. Which tests those are, and how they are read, the task set says.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from palestra import sandboxes
from palestra.errors import InfrastructureError
from palestra.protocols import Ran, Sandbox, Snapshot
from palestra.swe import diff as diffs

BASE = "base"
"""The branch and the message of the one commit that an agent finds."""

_GIT = ("git", "-c", "user.name=agent", "-c", "user.email=agent@localhost", "-c", "init.defaultBranch=base", "-c", "gc.auto=0")
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=true", "-c", "diff.noprefix=false")

_EXCLUDED = "__pycache__/\n*.pyc\n.pytest_cache/\n.hypothesis/\n*.egg-info/\n"


async def begin(sandbox: Sandbox, folder: str) -> str:
    """Make the folder a repository with one commit and no history; the commit."""
    await same_times(sandbox, folder)
    await _must(sandbox, [*_GIT, "init", "-q"], folder)
    await sandbox.write(f"{folder}/.git/info/exclude", _EXCLUDED.encode())
    await _must(sandbox, [*_GIT, "add", "-A", "-f"], folder)
    commit = [*_GIT, "commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", BASE, "--date", "2020-01-01T00:00:00Z"]
    await _must(sandbox, commit, folder)
    return await beginning(sandbox, folder)


async def settle(sandbox: Sandbox, folder: str) -> None:
    """After an installation: the files that it made are ignored, and what it changed is part of the one commit."""
    made = (await _must(sandbox, ["git", "ls-files", "--others", "--exclude-standard"], folder)).stdout
    exclude = _EXCLUDED + "".join(f"/{line}\n" for line in (made.head + made.tail).decode().splitlines())
    await sandbox.write(f"{folder}/.git/info/exclude", exclude.encode())
    await _must(sandbox, [*_GIT, "add", "--update"], folder)
    await _must(sandbox, [*_GIT, "commit", "-q", "--amend", "--allow-empty", "--no-gpg-sign", "--no-edit"], folder)
    await _must(sandbox, [*_GIT, "reflog", "expire", "--expire=now", "--all"], folder)
    await _must(sandbox, [*_GIT, "gc", "--quiet", "--prune=now"], folder)
    await same_times(sandbox, folder)


async def beginning(sandbox: Sandbox, folder: str) -> str:
    """The commit of a repository that was begun before."""
    return (await _must(sandbox, ["git", "rev-parse", "HEAD"], folder)).stdout.head.decode().strip()


async def same_times(sandbox: Sandbox, folder: str) -> None:
    """All files get the same time, so that none of them says that it was changed last."""
    await _must(
        sandbox, ["find", folder, "-mindepth", "1", "-exec", "touch", "-h", "-d", "2020-01-01T00:00:00Z", "{}", "+"], folder
    )


async def harvest(sandbox: Sandbox, folder: str, commit: str) -> str:
    """What differs from the commit, new files too, as git writes it. An agent that broke its repository has no diff."""
    if (await sandbox.run([*_GIT, *_SAFE, "add", "-A"], folder=folder)).code:
        return ""
    words = ["diff", "--cached", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--src-prefix=a/"]
    words += ["--dst-prefix=b/", "--full-index", commit, "--"]
    ran = await sandbox.run([*_GIT, *_SAFE, *words], folder=folder, keep=2 * diffs.LARGEST)
    if ran.code or not ran.stdout.whole:
        return ""
    return (ran.stdout.head + ran.stdout.tail).decode("utf-8", "replace")


@dataclass(frozen=True)
class Change:
    """What a grader puts into a fresh sandbox: files as the task has them, then the agent's diff, then a diff and files as
    the tests need them, which therefore cannot be the agent's."""

    folder: str
    diff: str
    before: Mapping[str, bytes] = field(default_factory=dict)
    after: Mapping[str, bytes] = field(default_factory=dict)
    then: str = ""


async def fresh(stack: AsyncExitStack, snapshot: Snapshot, change: Change) -> Sandbox | None:
    """A sandbox with the change in it; None where a diff does not fit."""
    sandbox = await stack.enter_async_context(sandboxes.open(snapshot))
    for path, data in change.before.items():
        await sandbox.write(f"{change.folder}/{path}", data)
    for diff in filter(None, (change.diff, change.then)):
        ran = await sandbox.run(["git", "apply", "--whitespace=nowarn", "-"], folder=change.folder, stdin=diff.encode())
        if ran.code:
            return None
    for path, data in change.after.items():
        await sandbox.write(f"{change.folder}/{path}", data)
    return sandbox


def python_in(*folders: str, except_: Sequence[str] = ()) -> Callable[[str], bool]:
    """Allows Python files in these folders, save those that a test runner or an interpreter would load by their name."""

    def allowed(path: str) -> bool:
        steps = path.split("/")
        if not path.endswith(".py") or steps[-1] in _LOADED_BY_NAME or path in except_:
            return False
        if any(step in ("test", "tests", "testing") for step in steps[:-1]) or steps[-1].startswith("test_"):
            return False
        return any(path.startswith(f"{folder}/") for folder in folders if folder) or path in folders

    return allowed


_LOADED_BY_NAME = ("conftest.py", "sitecustomize.py", "usercustomize.py", "setup.py")


def secret_folder() -> str:
    """For what the grader brings along; no diff can name it."""
    return f"/tmp/{secrets.token_hex(16)}"


async def _must(sandbox: Sandbox, command: Sequence[str], folder: str) -> Ran:
    ran = await sandbox.run(command, folder=folder)
    if ran.code:
        said = (ran.stderr.head + ran.stderr.tail).decode(errors="replace").strip()[:500]
        raise InfrastructureError(f"{' '.join(command[:3])} … in a sandbox ended with {ran.code}: {said}")
    return ran
