"""All tools on one sandbox: shell and editor see one another's work, and finish knows whether anything changed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from palestra.message import ToolCall
from palestra.protocols import Sandboxes, Spec
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.limits import Limits
from palestra.sandbox.local import Local, LocalSandbox
from palestra.tool import Finish, Toolbox
from palestra.tools.code import CodeIndex
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
    tools = Toolbox((await Workspace.open(LocalSandbox(folder), str(folder))).tools())

    async def call(name: str, /, **arguments: object) -> object:
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
    workspace = await Workspace.open(LocalSandbox(folder), str(folder))
    await workspace.shell.bash(command)
    assert await workspace.finish("") == Finish("", changed)


async def test_without_git_it_does_not_know(tmp_path: Path) -> None:
    workspace = await Workspace.open(LocalSandbox(tmp_path), str(tmp_path))
    assert (await workspace.finish()).changed is None


@pytest.mark.parametrize("kind", ["local", "bubblewrap"])
async def test_in_a_real_sandbox(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    provider: Sandboxes = Local() if kind == "local" else Bubblewrap(Limits(), cache=tmp_path / "cache")
    try:
        snapshot = await provider.snapshot(Spec({".": folder}))
        async with provider.open(snapshot) as sandbox:
            workspace = await Workspace.open(sandbox, index=CodeIndex(folder))
            tools = Toolbox(workspace.tools())

            async def call(name: str, /, **arguments: object) -> object:
                return await tools.run(ToolCall("c", name, arguments))

            assert await workspace.changed() is False
            await call("edit", path="code.py", old="a = 1", new="def bake():\n    return 2")
            assert "code.py:1-2 function bake" in str(await call("search_symbol", name="bake"))
            await call("bash", command="mkdir sub; cd sub; f() { echo from f; }")
            assert await call("bash", command="f; cat ../code.py; pwd") == (
                f"from f\ndef bake():\n    return 2\n{sandbox.folder}/sub\n[exit code 0]"
            )
            assert "[killed after 1 s" in str(await call("bash", command="sleep 60 & sleep 60", seconds=1))
            said = str(await call("bash", command="head -c 100000000 /dev/zero | tr '\\0' x", seconds=60))
            assert "of 100,000,000 bytes left out" in said
            assert await call("finish", answer="done") == Finish("done", changed=True)
    finally:
        await provider.close()
    assert (folder / "code.py").read_text() == "a = 1\n"
