"""All tools on one sandbox: shell and editor see one another's work, and finish knows whether anything changed."""

import subprocess
from pathlib import Path

import pytest
from folder_sandbox import FolderSandbox

from palestra.message import ToolCall
from palestra.tool import Finish, Toolbox
from palestra.tools.workspace import Workspace

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "code.py").write_text("a = 1\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    return folder


async def test_the_tools_work_on_the_same_files(folder: Path) -> None:
    tools = Toolbox((await Workspace.open(FolderSandbox(folder), str(folder))).tools())

    async def call(name: str, **arguments: object) -> object:
        return await tools.run(ToolCall("c", name, arguments))

    await call("edit", path="code.py", old="1", new="2")
    assert await call("bash", command="cat code.py; echo 'a = 3' > code.py") == "a = 2\n[exit code 0]"
    assert await call("view", path="code.py") == "     1\ta = 3"
    assert await call("finish", answer="done") == Finish("done", changed=True)


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("true", False),
        ("touch code.py cache.pyc", False),
        ("echo 'a = 2' > code.py", True),
        ("echo 'a = 2' > code.py; git add code.py", True),
        ("echo 'a = 2' > code.py; git -c user.name=a -c user.email=a@b commit -qam x", True),
        ("echo > new.py", True),
        ("rm code.py", True),
        ("rm -rf .git", None),
    ],
)
async def test_finish_knows_whether_anything_changed(folder: Path, command: str, changed: bool | None) -> None:
    workspace = await Workspace.open(FolderSandbox(folder), str(folder))
    await workspace.shell.bash(command)
    assert await workspace.finish("") == Finish("", changed)


async def test_without_git_it_does_not_know(tmp_path: Path) -> None:
    workspace = await Workspace.open(FolderSandbox(tmp_path), str(tmp_path))
    assert (await workspace.finish()).changed is None
