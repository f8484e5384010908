"""The tools of MCP servers, as an agent's. A server that a command starts runs beside Palestra, in no sandbox.

A connection belongs to an asyncio task of its own, which opens it, waits, and closes it: what the `mcp` package opens may only be
closed by the same task, and a rollout's runtime is closed by another one.
"""

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from palestra import config
from palestra.errors import ConfigError, InfrastructureError, ToolError, cause
from palestra.message import JSON
from palestra.tool import Outcome, Schema, function_schema
from palestra.tools.output import shortened

MAX_RESULT = 32_000
"""Characters of a result that the model is shown."""

OPEN_SECONDS = 60.0
"""Time for a server to start and to say what it offers."""


@dataclass(frozen=True)
class McpTool:
    """An `AnyTool`. The server itself checks the arguments."""

    name: str
    description: str
    parameters: Schema
    client: Any
    seconds: float

    def schema(self, strict: bool = False) -> Schema:
        return function_schema(self.name, self.description, self.parameters, strict)

    async def call(self, arguments: Mapping[str, JSON]) -> Outcome:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = await self.client.call_tool(self.name, dict(arguments), read_timeout_seconds=self.seconds)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise InfrastructureError(f"the MCP server of tool {self.name!r} has ended") from error
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"{self.name} took longer than {self.seconds:g} s") from None
            raise ToolError(shortened(str(error), MAX_RESULT)) from None
        text = shortened("\n".join(_as_text(block) for block in result.content), MAX_RESULT)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed")
        return text


async def open_tools(settings: config.Tools, stack: AsyncExitStack) -> list[McpTool]:
    """Connect to the servers that a config names, for as long as the stack is open."""
    return [tool for server in settings.mcp for tool in await stack.enter_async_context(mcp_tools(server, settings.seconds))]


@asynccontextmanager
async def mcp_tools(server: str, seconds: float = 120.0) -> AsyncIterator[Sequence[McpTool]]:
    """The tools of one server, given as the command that starts it or as its http address."""
    opened: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
    closing = asyncio.Event()
    serving = asyncio.create_task(_hold(server, seconds, opened, closing))
    try:
        either: set[asyncio.Future[Any]] = {opened, serving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await serving  # which raises
        yield opened.result()
    finally:
        if opened.done():
            closing.set()
        else:
            serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.exception()  # looked at: that a server did not close well hurts nobody


async def _hold(server: str, seconds: float, opened: "asyncio.Future[list[McpTool]]", closing: asyncio.Event) -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(OPEN_SECONDS):
                    client = await stack.enter_async_context(_client(server, log))
                    opened.set_result(await _list(client, seconds))
                await closing.wait()
        except ConfigError:
            raise
        except Exception as error:  # whatever may go wrong in a server and on the way to it
            raise _explained(server, error, log) from error


def _client(server: str, log: TextIO) -> Any:
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ImportError:
        raise ConfigError("tools.mcp needs the package mcp: pip install 'palestra[mcp]'") from None
    if server.startswith(("http://", "https://")):
        return Client(server)
    command, *arguments = shlex.split(server)
    return Client(stdio_client(StdioServerParameters(command=command, args=arguments), errlog=log))


def _explained(server: str, error: Exception, log: TextIO) -> ConfigError | InfrastructureError:
    """With the last line that the server wrote to its log, which often says why."""
    first = cause(error) if isinstance(error, BaseExceptionGroup) else error
    if isinstance(first, FileNotFoundError | PermissionError):
        return ConfigError(f"tools.mcp: {server!r} cannot be started: {first.strerror}")
    log.seek(0)
    said = log.read(1_000_000).strip().splitlines() or [str(first) or type(first).__name__]
    return InfrastructureError(f"the MCP server {server!r} does not answer: {said[-1]}")


async def _list(client: Any, seconds: float) -> list[McpTool]:
    listed, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if not cursor:
            return [McpTool(tool.name, tool.description or "", tool.input_schema, client, seconds) for tool in listed]


def _as_text(block: Any) -> str:
    """What renderers cannot show is named."""
    match block.type:
        case "text":
            return str(block.text)
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource_link":
            return f"[see {block.uri}]"
        case kind:
            return f"[{kind} {getattr(block, 'mime_type', '')}, not shown]"
