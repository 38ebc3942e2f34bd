"""How a family of models writes its thinking and its tool calls, as data.

One spec is read by the streaming reader (`reader`), writes the grammar of calls (`structured.tool_grammar`), and says
where a grammar begins in the engine process. Texts are spelled as the family's chat template spells them. White space
at their ends and between their words is what the template writes: readers take any, grammars write exactly that.
"""

from __future__ import annotations

import enum

from quire.records import dataclass


class Hole(enum.Enum):
    """What stands in a call between fixed texts."""

    NAME = "name"
    ID = "id"  # as the model writes it


class ArgumentForm(enum.Enum):
    """How the arguments of a call are written."""

    JSON = "json"  # an object
    TAGS = "tags"  # a pair of tags for each argument; strings are plain text, other values JSON


class CallIds(enum.Enum):
    """Where the ids of calls come from; `reader.call_id` makes them."""

    GENERATED = "generated"  # call_ and 24 hexadecimal digits
    NINE = "nine"  # 9 letters and digits, as templates of Mistral require
    INDEXED = "indexed"  # functions.NAME:INDEX, written by the model; the name is part of the id


class History(enum.Enum):
    """Where a template wants the reasoning of earlier turns."""

    FIELD = "field"  # in `reasoning_content` (or `thinking`) of the message
    CONTENT = "content"  # in the content, between the model's own opener and closer
    NONE = "none"  # nowhere: it is left out


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call is a JSON object. `array`: the calls of a region are the items of a JSON array, which is written as
    `layout`: its start, what stands between two items, and its end.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""  # the key of an id that the model writes
    array: bool = False
    layout: tuple[str, str, str] = ("[", ", ", "]")


@dataclass(frozen=True, slots=True)
class Tags:
    """One argument is `open`, its name, `middle`, its value, `close`."""

    open: str
    middle: str
    close: str


@dataclass(frozen=True, slots=True)
class HeadedCall:
    """A call is a head with its name, arguments, and a tail. A tuple in `head` is a group that may be missing."""

    head: tuple[str | Hole | tuple[str | Hole, ...], ...]
    tail: str = ""
    arguments: ArgumentForm = ArgumentForm.JSON
    tags: Tags | None = None


@dataclass(frozen=True, slots=True)
class PythonCall:
    """The calls of a region are a list of Python: [name(key=value, …), …]."""


@dataclass(frozen=True, slots=True)
class ChannelCall:
    """Messages with a head that names a channel and a recipient, as in OpenAI's harmony: a call is one to a function,
    reasoning is on the channel "analysis", all else is text.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """How a family writes tool calls.

    A region is `opener`, calls with `between` between them, `closer`. Without `between` a region has one call, and
    regions repeat with `again` between them. An `opener` of "" opens a region at the start of the answer only. `others`
    are more openers that are read and never written. The end of the turn closes every region. `lead` stands between
    the text of the answer and the first region.
    """

    name: str
    call: ObjectCall | HeadedCall | PythonCall | ChannelCall
    opener: str
    closer: str
    others: tuple[str, ...] = ()
    between: str | None = None
    again: str = ""
    lead: str = ""
    ids: CallIds = CallIds.GENERATED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSpec:
    """How a family writes its thinking: `opener`, reasoning, `closer`, then the answer.

    A region that the prompt has opened is open from the start: `opened_by`. `at_calls`: the opener of calls closes it,
    too. `channel`: the call spec of the family reads it.
    """

    name: str
    opener: str
    closer: str
    at_calls: bool = False
    channel: bool = False
    history: History = History.FIELD

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt, or the end of one, leaves the region open."""
        return bool(self.opener) and prompt.rstrip().endswith(self.opener.strip())


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The regions of a model's answers. `answer` are an opener and a closer around the text itself, not part of it."""

    calls: CallSpec | None = None
    reasoning: ReasoningSpec | None = None
    answer: tuple[str, str] = ("", "")
