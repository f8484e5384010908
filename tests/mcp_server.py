"""An MCP server, as anybody might write one, for the tests: `python mcp_server.py`, or with a port over http."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("weather")
visits = 0


@server.tool()
def weather(city: str, days: int = 1) -> str:
    """The weather in a city."""
    global visits
    visits += 1
    return f"{city}: rain for {days} days, visit {visits}"


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def flood() -> str:
    """Says a lot."""
    return "x" * 1_000_000


@server.tool()
def picture() -> Image:
    """Shows a picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def whoami() -> str:
    """The server's process."""
    return f"{os.getpid()} {os.environ.get('PALESTRA_SECRET', 'knows nothing')}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
