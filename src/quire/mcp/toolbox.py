"""The allowed tools of several servers, as the functions that a model may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from quire import __version__
from quire.mcp.connect import connect
from quire.mcp.session import CallResult, McpError, McpSession
from quire.mcp.settings import McpSettings, ServerSettings
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class _Entry:
    session: McpSession
    rendered: dict[str, Any]


class Toolbox:
    """Connects to every server of a file. Use it as a context: leaving it ends all servers.

    `tools` are in OpenAI's form. `notes` say which tools a server offers that may not be called. Raises McpError for a
    server that fails, and for two allowed tools of one name.
    """

    def __init__(self, settings: McpSettings) -> None:
        self.notes: list[str] = []
        self._sessions: list[McpSession] = []
        self._entries: dict[str, _Entry] = {}
        try:
            for server in settings.servers:
                self._add(server, settings.message_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The functions that may be called."""
        return [entry.rendered for entry in self._entries.values()]

    def call(self, name: str, arguments: str) -> CallResult:
        """Call a function with JSON arguments. What goes wrong is a result, too: the model can react to it."""
        entry = self._entries.get(name)
        if entry is None:
            return CallResult(f"there is no tool {name!r}", failed=True)
        try:
            return entry.session.call(name, read_arguments(arguments))
        except ValueError as error:
            return CallResult(str(error), failed=True)
        except McpError as error:
            return CallResult(str(error), failed=True)

    def close(self) -> None:
        """End all sessions."""
        while self._sessions:
            self._sessions.pop().close()

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, server: ServerSettings, max_bytes: int) -> None:
        session = connect(server, max_bytes)
        self._sessions.append(session)
        session.open(__version__)
        offered = session.tools()
        missing = sorted(server.tools - {tool.name for tool in offered} - {"*"})
        if missing:
            raise McpError(f"MCP server {server.name!r} has no tool {', '.join(missing)}")
        for tool in offered:
            if not server.allows(tool.name):
                continue
            if tool.name in self._entries:
                raise McpError(f"two MCP servers offer a tool {tool.name!r}; allow only one of them")
            function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            self._entries[tool.name] = _Entry(session, {"type": "function", "function": function})
        left = [tool.name for tool in offered if not server.allows(tool.name)]
        if left:
            self.notes.append(
                f'{server.name} also offers {", ".join(left)}; "tools" names those that may be called'
            )


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Raises ValueError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the arguments are not a JSON object")
    return found
