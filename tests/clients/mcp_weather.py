"""A tool server made with the official SDK: `python mcp_weather.py`, or with a port over HTTP."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")


@server.tool()
def get_weather(city: str) -> dict[str, str | int]:
    """Get the current weather of a city."""
    return {"temperature": 21, "sky": "sunny", "city": city}


@server.tool()
def erase() -> str:
    """Erase everything."""
    raise AssertionError("was called")


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
