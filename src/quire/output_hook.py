"""What an operator's hook on the output of a server gets and returns; see docs/server.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from quire import records


@records.dataclass(slots=True)
class OutputChunk:
    """A piece of an answer. `text` begins with what the hook has held back; where pieces end depends on the load.

    `kind` is "text", "reasoning" or "arguments": those of a call of `function`. `last`: nothing more of this part of
    the answer comes. `state` is the hook's own, one for each answer; `sample` is its number in the request.
    """

    request_id: str
    sample: int
    kind: str
    text: str
    last: bool
    function: str = ""
    state: dict[str, Any] = field(default_factory=dict)


@records.dataclass(frozen=True, slots=True)
class OutputEdit:
    """What becomes of a chunk: `text` goes to the client, `held` comes again at the start of the next chunk of this
    part (behind the last one it is sent). `end` ends the answer behind `text`: the reason that the client is told.
    """

    text: str
    held: str = ""
    end: str | None = None


# None: the text as it is; a string: that in its place.
OutputHook = Callable[[OutputChunk], OutputEdit | str | None]
