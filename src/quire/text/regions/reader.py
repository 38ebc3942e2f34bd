"""Divide the output of a sample into text, reasoning and calls, token by token, for every format of `spec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.regions.markers import Markers
from quire.text.regions.spec import CallIds, RegionSpec
from quire.types import AnswerPart

Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> JSON schema of its parameters


def call_id(ids: CallIds, seed: str, index: int, name: str) -> str:
    """The id of a call that the model gave none: the same for the same seed, index and name."""
    raise NotImplementedError


class RegionReader:
    """Reads one sample (text.parts.PartReader). The parts of a sample add up to the same whatever its tokens are
    pushed with, and no text is lost: what turns out not to be a call comes back as text.

    `tools` are the functions that may be called, None if calls are not read at all (tool_choice none, no tools).
    `thinking`: the prompt left the thinking region open (`ReasoningSpec.opened_by`). `eager`: arguments are parts
    as they arrive, for a sample whose grammar keeps calls to their format; otherwise a call is held back until it
    is whole. `seed` determines generated ids: it names the request and the sample. `hide`: markers that mean nothing
    where they stand are left out of the text, as skip_special_tokens asks.
    """

    def __init__(
        self,
        spec: RegionSpec,
        markers: Markers | None = None,
        *,
        tools: Tools | None = None,
        thinking: bool = False,
        eager: bool = False,
        hide: bool = True,
        seed: str = "",
    ) -> None: ...

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens so far that are reasoning, with those that open and close it."""
        raise NotImplementedError

    @property
    def calls(self) -> int:
        """Number of calls that have begun."""
        raise NotImplementedError

    def push(self, token_id: int, text: str, /) -> list[AnswerPart]:
        """Append a token (-1 for text without one) and the text that it makes final; the parts that are certain now."""
        raise NotImplementedError

    def finish(self, text: str = "", /) -> list[AnswerPart]:
        """The last text, which belongs to no new token, and what was held back: the sample has ended."""
        raise NotImplementedError


def read_whole(spec: RegionSpec, text: str, tools: Tools | None, **options: Any) -> Sequence[AnswerPart]:
    """The parts of a whole text, in which markers are spelled."""
    raise NotImplementedError
