"""`palestra mcp serve`: an agent's tools over MCP, on standard input and output, for any other program that knows MCP."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra.errors import ToolError, UsageError
from palestra.message import Content, Text, ToolCall
from palestra.protocols import Spec
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.sandbox.limits import Limits
from palestra.sandbox.local import LocalSandbox
from palestra.tool import Finish, Toolbox
from palestra.tools.code import CodeIndex, CodeSearch
from palestra.tools.workspace import Workspace


async def serve_folder(folder: Path, sandboxed: bool) -> None:
    """Serve the tools for coding, on a folder as it is or on a copy in a sandbox, which is forgotten at the end."""
    if not folder.is_dir():  # noqa: ASYNC240  # nothing else runs yet
        raise UsageError(f"{folder} is no folder; give the one to work in")
    place = folder.resolve()  # noqa: ASYNC240
    async with _copied(place) if sandboxed else _as_it_is(place) as workspace:
        await serve(Toolbox(tool for tool in workspace.tools() if tool != workspace.finish))


@asynccontextmanager
async def _as_it_is(folder: Path) -> AsyncIterator[Workspace]:
    yield Workspace(LocalSandbox(folder), search=CodeSearch(CodeIndex(folder)))


@asynccontextmanager
async def _copied(folder: Path) -> AsyncIterator[Workspace]:
    provider = Bubblewrap(Limits())
    try:
        snapshot = await provider.snapshot(Spec({".": folder}))
        async with provider.open(snapshot) as sandbox:
            yield await Workspace.open(sandbox, index=CodeIndex(folder))
    finally:
        await provider.close()


async def serve(tools: Toolbox, name: str = "palestra") -> None:
    """Serve until the client hangs up. What ends an agent's run only answers here; whoever calls decides when it is over."""
    try:
        from mcp.server import Server
        from mcp.server.stdio import stdio_server
        from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool
    except ImportError:
        raise UsageError("serving tools needs the package mcp: pip install 'palestra[mcp]'") from None

    async def list_tools(context: Any, parameters: Any) -> Any:
        functions = [schema["function"] for schema in tools.schemas()]
        return ListToolsResult(
            tools=[Tool(name=f["name"], description=f["description"], input_schema=f["parameters"]) for f in functions]
        )

    async def call_tool(context: Any, parameters: Any) -> Any:
        try:
            outcome = await tools.run(ToolCall("", parameters.name, parameters.arguments or {}))
        except ToolError as error:
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
        if isinstance(outcome, Finish):
            outcome = str(outcome.answer)
        if not isinstance(outcome, str | tuple):
            return CallToolResult(content=[TextContent(text="this tool works in a run only")], is_error=True)
        return CallToolResult(content=[TextContent(text=text) for text in _texts(outcome)])

    server: Any = Server(name, on_list_tools=list_tools, on_call_tool=call_tool)
    with _endable_input() as end:
        async with stdio_server() as (read, write):
            try:
                await server.run(read, write, server.create_initialization_options())
            finally:
                end()


@contextmanager
def _endable_input() -> Iterator[Callable[[], None]]:
    """Standard input by way of a pipe that we can end. The server reads it in a thread, and when it is stopped, waits for that
    thread, which would wait for the client."""
    client = os.dup(0)
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.close(reading)
    pipe = os.fdopen(writing, "wb", buffering=0)

    def pump() -> None:
        with suppress(OSError, ValueError):  # ended meanwhile
            while read := os.read(client, 65536):
                while read:
                    read = read[pipe.write(read) :]
        pipe.close()

    threading.Thread(target=pump, daemon=True).start()
    try:
        yield pipe.close
    finally:
        os.dup2(client, 0)


def _texts(content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.text if isinstance(part, Text) else f"[{part.media_type}, not shown]" for part in content]
