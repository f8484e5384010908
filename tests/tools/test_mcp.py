"""MCP in both directions, against real servers in processes of their own: tools that are taken, tools that are given."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from playing import Probe, calling, play

from palestra import config
from palestra.agent import Limits
from palestra.backends.scripted import ScriptedSession
from palestra.errors import ConfigError, InfrastructureError, ToolDefinitionError, ToolError
from palestra.message import ToolCall
from palestra.policy import TokenPolicy
from palestra.protocols import Policy, Renderer, Sampling
from palestra.rollout import OpenTools, Rollout, run_through
from palestra.tool import Toolbox
from palestra.tools.mcp import MAX_RESULT, McpTool, mcp_tools, open_tools
from palestra.trajectory import Key

pytest.importorskip("mcp", reason="MCP needs its package: pip install 'palestra[mcp]'")

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SERVER = f"{sys.executable} {TESTS / 'mcp_server.py'}"


async def call(tools: Sequence[McpTool], name: str, /, **arguments: object) -> object:
    return await Toolbox(tools).run(ToolCall("c", name, arguments))


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# Tools that are taken


async def test_a_servers_tools_are_an_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_SECRET", "of the user")
    async with mcp_tools(SERVER) as tools:
        names = [tool.name for tool in tools]
        assert names == ["weather", "fail", "wait", "flood", "picture", "die", "whoami"]
        [schema] = [tool.schema()["function"] for tool in tools if tool.name == "weather"]
        assert schema["description"] == "The weather in a city."
        assert schema["parameters"]["properties"]["city"]["type"] == "string"
        assert schema["parameters"]["required"] == ["city"]
        assert tools[0].schema(strict=True)["function"]["parameters"]["required"] == ["city", "days"]
        assert await call(tools, "weather", city="Zürich") == "Zürich: rain for 1 days, visit 1"
        assert await call(tools, "weather", city="Bern", days=3) == "Bern: rain for 3 days, visit 2"
        process, secret = str(await call(tools, "whoami")).split(maxsplit=1)
        assert secret == "knows nothing"
        assert alive(int(process))
    assert not alive(int(process))


async def test_what_goes_wrong_in_a_tool_is_told_to_the_model() -> None:
    async with mcp_tools(SERVER, seconds=0.5) as tools:
        with pytest.raises(ToolError, match="not today"):
            await call(tools, "fail", why="not today")
        with pytest.raises(ToolError, match="days"):
            await call(tools, "weather", city="Bern", days="many")
        with pytest.raises(ToolError, match=r"wait took longer than 0\.5 s"):
            await call(tools, "wait", seconds=30)
        assert await call(tools, "weather", city="Bern") == "Bern: rain for 1 days, visit 1"


async def test_long_and_odd_results() -> None:
    async with mcp_tools(SERVER) as tools:
        flood = str(await call(tools, "flood"))
        assert len(flood) < MAX_RESULT + 100
        assert "of 1,000,000 characters left out" in flood
        assert await call(tools, "picture") == "[image image/png, not shown]"


async def test_a_server_that_dies_is_no_fault_of_the_model() -> None:
    async with mcp_tools(SERVER) as tools:
        with pytest.raises(InfrastructureError, match="has ended"):
            await call(tools, "die")
        with pytest.raises(InfrastructureError, match="has ended"):
            await call(tools, "weather", city="Bern")


async def test_a_server_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        async with mcp_tools("no-such-program --at all"):
            pass
    with pytest.raises(InfrastructureError, match="does not answer: no key"):
        async with mcp_tools(f"{sys.executable} -c 'import sys; sys.exit(\"no key\")'"):
            pass
    monkeypatch.setattr("palestra.tools.mcp.OPEN_SECONDS", 0.5)
    with pytest.raises(InfrastructureError, match="does not answer: TimeoutError"):
        async with mcp_tools(f"{sys.executable} -c 'import time; time.sleep(60)'"):
            pass


async def test_who_is_cancelled_while_it_opens_leaves_nothing(tmp_path: Path) -> None:
    note = tmp_path / "process"
    silent = f'{sys.executable} -c \'import os, time; open("{note}", "w").write(str(os.getpid())); time.sleep(600)\''

    async def use() -> None:
        async with mcp_tools(silent):
            raise AssertionError

    using = asyncio.create_task(use())
    while not note.exists() or not note.read_text():  # noqa: ASYNC110  # another process writes it
        await asyncio.sleep(0.02)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert not alive(int(note.read_text()))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_it_may_be_closed_by_another_task() -> None:
    stack = AsyncExitStack()
    tools = await asyncio.create_task(open_tools(config.Tools(mcp=(SERVER, SERVER)), stack))
    assert len(tools) == 14
    process = int(str(await asyncio.create_task(call(tools[:7], "whoami"))).split()[0])
    await asyncio.create_task(stack.aclose())
    assert not alive(process)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*SERVER.split(), str(port)], stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.terminate()


async def test_over_http(address: str) -> None:
    async with mcp_tools(address) as tools:
        assert await call(tools, "weather", city="Bern") == "Bern: rain for 1 days, visit 1"
    with pytest.raises(InfrastructureError, match="does not answer"):
        async with mcp_tools(address.replace("/mcp", "/nothing")):
            pass
    with pytest.raises(InfrastructureError, match="does not answer"):
        async with mcp_tools("http://127.0.0.1:9/mcp"):
            pass


# In a rollout


def rollout(renderer: Renderer, task: Probe, *replies: object, open_tools: OpenTools) -> Rollout:
    @asynccontextmanager
    async def open_policy(seed: int) -> AsyncIterator[Policy]:
        yield TokenPolicy(ScriptedSession(play(*replies), renderer), renderer, Sampling(max_tokens=1000), 100_000)  # type: ignore[arg-type]

    return Rollout(task, Key("train", 0, task.id, 0), open_policy, Limits(5, 60.0), 0, open_tools=open_tools)


async def test_a_rollout_has_them_by_one_line_of_config(renderer: Renderer) -> None:
    settings = config.parse({"run": {"folder": "r"}, "tasks": {"heldout": "a:b"}, "tools": {"mcp": [SERVER]}}).tools
    replies = calling(("weather", {"city": "Bern"}), ("whoami", {})), calling(("done", {"answer": "right"}))

    async def opened(stack: AsyncExitStack) -> list[McpTool]:
        return await open_tools(settings, stack)

    attempt = rollout(renderer, Probe("t"), *replies, open_tools=opened)
    await run_through(attempt)
    assert attempt.trajectory.failure is None
    assert attempt.trajectory.reward == 1.0
    said, process = attempt.trajectory.turns[0].results
    assert said.text == "Bern: rain for 1 days, visit 1"
    assert not alive(int(process.text.split()[0]))


async def test_a_server_that_dies_in_a_rollout_fails_it_as_infrastructure(renderer: Renderer) -> None:
    settings = config.Tools(mcp=(SERVER,))
    attempt = rollout(renderer, Probe("t"), calling(("die", {})), open_tools=lambda stack: open_tools(settings, stack))
    await attempt.advance()
    await attempt.advance()
    assert [failure.kind for failure in attempt.trajectory.retried] == ["infrastructure"]
    await attempt.close()


async def test_two_tools_of_one_name_are_refused(renderer: Renderer) -> None:
    settings = config.Tools(mcp=(SERVER, SERVER))
    attempt = rollout(renderer, Probe("t"), "never", open_tools=lambda stack: open_tools(settings, stack))
    with pytest.raises(ToolDefinitionError, match="two tools are named 'weather'"):
        await run_through(attempt)


@pytest.mark.parametrize(("wrong", "complaint"), [("", "give a command"), ("a 'b", "no command line")])
def test_commands_that_are_none(wrong: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config.parse({"run": {"folder": "r"}, "tasks": {"heldout": "a:b"}, "tools": {"mcp": [wrong]}})


# Tools that are given


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "code.py").write_text("class Cake:\n    def bake(self):\n        return 1\n")
    return folder


@pytest.mark.parametrize("sandboxed", [False, True])
async def test_palestras_tools_are_served(repository: Path, sandboxed: bool) -> None:
    if sandboxed and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    server = f"{sys.executable} -m palestra mcp serve {repository}" + (" --sandbox" if sandboxed else "")
    async with mcp_tools(f"env PYTHONPATH={ROOT} {server}") as tools:
        names = {tool.name for tool in tools}
        assert names >= {"bash", "view", "edit", "create", "undo", "search_symbol", "search_text"}
        assert "finish" not in names
        assert "class Cake" in str(await call(tools, "search_symbol", name="Cake"))
        await call(tools, "edit", path="code.py", old="return 1", new="return 2")
        await call(tools, "bash", command="x=kept")
        assert await call(tools, "bash", command="echo $x; grep return code.py") == "kept\n        return 2\n[exit code 0]"
        with pytest.raises(ToolError, match=r"old is not in code\.py"):
            await call(tools, "edit", path="code.py", old="return 1", new="return 2")
        with pytest.raises(ToolError, match="unknown argument 'file'; known: end, path, start"):
            await call(tools, "view", file="code.py")
    assert ("return 2" in (repository / "code.py").read_text()) == (not sandboxed)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("sandboxed", [False, True])
def test_a_server_that_is_stopped_does_not_wait_for_its_client(repository: Path, sandboxed: bool, stop: signal.Signals) -> None:
    if sandboxed and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    command = [sys.executable, "-m", "palestra", "mcp", "serve", str(repository), *(["--sandbox"] if sandboxed else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stderr is not None
        server.stdin.write(json.dumps(INITIALIZE) + "\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["id"] == 1
        server.send_signal(stop)
        assert server.wait(60) == 128 + stop
        assert "Traceback" not in server.stderr.read()


def test_a_folder_that_is_none_is_one_line() -> None:
    command = [sys.executable, "-m", "palestra", "mcp", "serve", "no/such"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (2, "palestra: no/such is no folder; give the one to work in\n")
