"""The tools of `quire chat`: functions from a file, whose results are typed in, and tool servers, which are called."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.types import RequestError
from quire.util.strict_json import read_small_file

if TYPE_CHECKING:
    from quire.mcp.toolbox import Toolbox

_MAX_FILE_BYTES = 2**20
_ROUNDS = 8


class ChatTools:
    """The functions of a chat. The results of those in `typed` are typed in; tool servers give the others.

    `rounds` limits the answers with calls that may follow one another.
    """

    def __init__(self, functions: Sequence[dict[str, Any]], box: Toolbox | None, rounds: int) -> None:
        self.tools = [*functions, *(box.tools if box is not None else ())]
        self.typed = {tool["function"].get("name") for tool in functions}
        self.rounds = rounds
        self._box = box

    def call(self, name: str, arguments: str) -> str:
        """The result of a call, from a tool server."""
        return self._box.call(name, arguments).text if self._box is not None else f"there is no tool {name!r}"


@contextmanager
def chat_tools(args: argparse.Namespace) -> Iterator[ChatTools | None]:
    """The tools that --tools and --mcp name, while their servers run. Raises RequestError and McpError."""
    functions = _read_tools(args.tools) if args.tools else []
    if not args.mcp:
        yield ChatTools(functions, None, _ROUNDS) if functions else None
        return
    from quire.mcp.settings import read_settings
    from quire.mcp.toolbox import Toolbox

    settings = read_settings(args.mcp)
    with Toolbox(settings) as box:
        for note in () if args.quiet else box.notes:
            print(f"quire: {note}", file=sys.stderr)
        yield ChatTools(functions, box, settings.rounds)


def _read_tools(path: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(read_small_file(Path(path), _MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise RequestError("tools", f"{path} is not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise RequestError("tools", f"{path} is not a list of functions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _is_function(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function", tool), dict)
