"""From the settings of a tool server to a session with it."""

from __future__ import annotations

from quire.mcp.http import HttpTransport
from quire.mcp.session import McpSession
from quire.mcp.settings import ServerSettings
from quire.mcp.stdio import StdioTransport


def connect(server: ServerSettings, max_bytes: int) -> McpSession:
    """A session that is not open yet; the server is started if it is one that has a command. Its messages may have
    `max_bytes`. Raises McpError.
    """
    if server.url:
        transport: HttpTransport | StdioTransport = HttpTransport(
            server.name, server.url, server.headers, max_bytes
        )
    else:
        transport = StdioTransport(server.name, server.command, server.env, server.cwd, max_bytes)
    return McpSession(server.name, transport, server.timeout)
