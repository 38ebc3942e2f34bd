"""Read the calls of a region, in each of the forms of `spec`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from quire.answers import AnswerPart, PartKind
from quire.text.regions.argument_types import tag_json, value_types
from quire.text.regions.arriving import ArrivingText, MalformedError, Pausing, words
from quire.text.regions.markers import Markers
from quire.text.regions.python_literal import json_of_literal
from quire.text.regions.scanners import Delimiters, JsonScanner, PythonScanner
from quire.text.regions.spec import (
    ArgumentForm,
    CallIds,
    CallSpec,
    HeadedCall,
    Hole,
    ObjectCall,
    PythonCall,
    Tags,
)

Tools = Mapping[str, Mapping[str, Any]]  # name of a function -> JSON schema of its parameters

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_INDEXED = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def call_id(ids: CallIds, seed: str, index: int, name: str) -> str:
    """The id of a call that the model gave none: the same for the same seed, index and name."""
    if ids is CallIds.INDEXED:
        return f"functions.{name}:{index}"
    digest = hashlib.sha256(f"{seed}\0{index}".encode("utf-8", "surrogatepass")).digest()
    if ids is CallIds.NINE:
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:9])
    return f"call_{digest[:12].hex()}"


class CallReader(ArrivingText):
    """The calls of one sample. A call is held back until it is whole, unless the reader is eager."""

    __slots__ = (
        "_begun",
        "_calls",
        "_eager",
        "_ends",
        "_pieces",
        "_seed",
        "_spec",
        "_started",
        "_tools",
        "_written",
    )

    def __init__(
        self, spec: CallSpec | None, markers: Markers, tools: Tools | None, eager: bool, seed: str
    ) -> None:
        super().__init__(markers)
        self._spec, self._tools = spec, tools
        self._eager, self._seed = eager, seed
        self._calls = 0
        self._started = False  # parts of the call are out
        self._begun: AnswerPart | None = None  # the call that is being read, until its start is out
        self._pieces: list[str] = []  # of its arguments
        self._written = self._encoded(spec) if spec is not None else None
        tags = self._tags()
        self._ends = Delimiters(words([tags.close])) if tags is not None else None

    def _tags(self) -> Tags | None:
        call = self._written.call if self._written is not None else None
        return call.tags if isinstance(call, HeadedCall) else None

    def _encoded(self, spec: CallSpec) -> CallSpec:
        """The spec with its markers as the reader sees them."""
        encode = self._markers.encode
        call = spec.call
        if isinstance(call, HeadedCall):
            head = tuple(
                tuple(encode(piece) if isinstance(piece, str) else piece for piece in part)
                if isinstance(part, tuple)
                else encode(part) if isinstance(part, str) else part
                for part in call.head
            )  # fmt: skip
            tags = call.tags and Tags(
                encode(call.tags.open), encode(call.tags.middle), encode(call.tags.close)
            )
            call = HeadedCall(head, encode(call.tail), call.arguments, tags)
        return CallSpec(
            name=spec.name,
            call=call,
            opener=encode(spec.opener),
            closer=encode(spec.closer),
            others=tuple(map(encode, spec.others)),
            between=None if spec.between is None else encode(spec.between),
            again=encode(spec.again),
            lead=encode(spec.lead),
            ids=spec.ids,
        )

    # -- parts of a call ---------------------------------------------------------------------------

    def _begin(self, name: str, written_id: str = "") -> None:
        number = self._calls
        ids = self._spec.ids if self._spec is not None else CallIds.GENERATED
        made = written_id or call_id(ids, self._seed, number, name)
        self._begun = AnswerPart(PartKind.CALL, name, number, made)
        if self._eager:
            self._release()

    def _argue(self, text: str) -> None:
        """Add text to the arguments."""
        if text:
            self._pieces.append(self._markers.spell(text))
            if self._eager:
                self._release()

    def _release(self) -> None:
        if self._begun is not None:
            self._parts.append(self._begun)
            self._begun, self._started = None, True
        self._show(PartKind.ARGUMENTS, "".join(self._pieces), self._calls)
        self._pieces.clear()
        self._unshown.clear()

    def _end_call(self, written_id: str = "") -> None:
        """The call is whole."""
        if written_id and self._begun is not None:
            self._begun.call_id = written_id
        self._release()
        self._started = False
        self._calls += 1

    def _drop_call(self) -> None:
        """The rest of the region is no call. What an eager reader has given out stays a call, unfinished."""
        self._begun = None
        self._pieces.clear()
        self._calls += self._started
        self._started = False

    # -- regions -----------------------------------------------------------------------------------

    def _region_calls(self, spec: CallSpec) -> Pausing:
        """The calls behind an opener, and the closer if there is one."""
        call = spec.call
        if isinstance(call, ObjectCall):
            if call.array and (yield from self._maybe("[")):
                yield from self._listed(self._object(call), call)
            else:
                yield from self._object(call)
                while spec.between is not None and (yield from self._next_object(spec.between)):
                    yield from self._object(call)
        elif isinstance(call, PythonCall):
            yield from self._python(spec)
        elif isinstance(call, HeadedCall):
            yield from self._headed(call)
            if spec.between is not None:
                while not (yield from self._maybe(spec.closer)):
                    yield from self._space()
                    if not (yield from self._begins(call)):
                        break
                    yield from self._headed(call)
                else:
                    self._unshown.clear()
                    return
        if (yield from self._maybe(spec.closer)):
            self._unshown.clear()
        else:
            self._unread()

    def _next_object(self, between: str) -> Generator[None, None, bool]:
        if between.strip() and not (yield from self._maybe(between)):
            return False
        yield from self._space()
        return (yield from self._peek()) == "{"

    def _begins(self, call: HeadedCall) -> Generator[None, None, bool]:
        """Whether another call begins: with the first word of its head, or with any name."""
        first = call.head[0]
        char = yield from self._peek()
        if isinstance(first, str):
            return bool(char) and first.lstrip().startswith(char)
        return char.isalnum()

    def _listed(self, first: Pausing, call: ObjectCall) -> Pausing:
        """The items of an array, behind its bracket."""
        yield from first
        while not (yield from self._maybe("]")):
            yield from self._fixed(",")
            yield from self._object(call)
        self._unshown.clear()

    # -- objects -----------------------------------------------------------------------------------

    def _object(self, call: ObjectCall) -> Pausing:
        """One call as a JSON object. Arguments before the name are held until the name is known."""
        yield from self._fixed("{")
        name, written_id, held, streamed = "", "", "", False
        while True:
            yield from self._space()
            key = _unquoted((yield from self._quoted()))
            yield from self._fixed(":")
            yield from self._space()
            if key == call.name and not name:
                name = _unquoted((yield from self._quoted()))
            elif key in {call.arguments, "arguments", "parameters"} and not (held or streamed):
                if name:
                    self._begin(name, written_id)
                    streamed = True
                held = yield from self._object_arguments(streamed)
            elif call.id and key == call.id:
                written_id = yield from self._id_value()
            else:
                yield from self._skip_value()
            yield from self._space()
            if not (yield from self._word(",")):
                break
        yield from self._fixed("}")
        if not name:
            raise MalformedError
        if not streamed:
            self._begin(name, written_id)
            self._argue(held or "{}")
        self._end_call(written_id)

    def _object_arguments(self, stream: bool) -> Generator[None, None, str]:
        """The arguments in an object: JSON, JSON in a string, or null. Returned unless they are streamed."""
        char = yield from self._peek()
        if char == "{":
            return (yield from self._json(stream))
        held = yield from self._json(False)
        if char == '"':
            held = _unquoted(held[1:-1])
            if not isinstance(_parsed(held), dict):
                raise MalformedError
        elif held == "null":
            held = "{}"
        else:
            raise MalformedError
        if stream:
            self._argue(held)
        return held

    def _id_value(self) -> Generator[None, None, str]:
        if (yield from self._peek()) == '"':
            return _unquoted((yield from self._quoted()))
        return (yield from self._json(False))[:64]

    def _skip_value(self) -> Pausing:
        yield from self._json(False)

    def _json(self, stream: bool) -> Generator[None, None, str]:
        """A JSON value, as arguments of the call or returned."""
        scanner = JsonScanner()
        pieces: list[str] = []
        while True:
            piece = self._take(scanner.feed(self._text, self._at))
            if stream:
                self._argue(piece)
            else:
                pieces.append(piece)
            if scanner.done:
                return self._markers.spell("".join(pieces))
            if scanner.failed or self._ended:
                raise MalformedError
            yield

    # -- heads -------------------------------------------------------------------------------------

    def _headed(self, call: HeadedCall) -> Pausing:
        """One call with a head, arguments and a tail."""
        found: dict[Hole, str] = {}
        for part in call.head:
            if isinstance(part, tuple):
                if isinstance(part[0], str) and (yield from self._maybe(part[0])):
                    for piece in part[1:]:
                        yield from self._head_part(piece, found)
            else:
                yield from self._head_part(part, found)
        written_id = found.get(Hole.ID, "")
        name = found.get(Hole.NAME, "")
        if not name:
            match = _INDEXED.fullmatch(written_id)
            if match is None:
                raise MalformedError
            name = match.group(1)
        self._begin(name, written_id)
        if call.arguments is ArgumentForm.TAGS and call.tags is not None:
            yield from self._tagged(call, call.tags, name)
        else:
            yield from self._space()
            if (yield from self._peek()) != "{":
                raise MalformedError
            yield from self._json(True)
        self._end_call()
        if call.arguments is ArgumentForm.TAGS or (yield from self._maybe(call.tail)):
            self._unshown.clear()
        else:
            self._unread()

    def _head_part(self, part: str | Hole, found: dict[Hole, str]) -> Pausing:
        if isinstance(part, str):
            yield from self._fixed(part)
        else:
            found[part] = yield from self._name()

    def _tagged(self, call: HeadedCall, tags: Tags, name: str) -> Pausing:
        """Arguments in tags, up to the tail of the call."""
        schema = (self._tools or {}).get(name, {})
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        properties = properties if isinstance(properties, Mapping) else {}
        seen: set[str] = set()
        while not (yield from self._maybe(call.tail)):
            yield from self._fixed(tags.open)
            key = yield from self._key()
            if key in seen:
                raise MalformedError
            yield from self._fixed(tags.middle)
            if tags.middle.endswith("\n"):
                yield from self._word("\n")
            self._argue(("{" if not seen else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            seen.add(key)
            yield from self._tag_value(value_types(properties.get(key), schema))
        self._argue("}" if seen else "{}")

    def _tag_value(self, types: frozenset[str]) -> Pausing:
        """A value up to the closing tag: text as it arrives for a string, else JSON when it is whole."""
        assert self._ends is not None
        text = types == {"string"}
        if text:
            self._argue('"')
        pieces: list[str] = []
        while True:
            piece, end = yield from self._until(self._ends)
            if text:
                self._argue(json.dumps(self._markers.spell(piece), ensure_ascii=False)[1:-1])
            else:
                pieces.append(piece)
            if end:
                break
            if end == "":
                raise MalformedError
        self._argue('"' if text else tag_json(self._markers.spell("".join(pieces)), types))

    # -- Python ------------------------------------------------------------------------------------

    def _python(self, spec: CallSpec) -> Pausing:
        listed = yield from self._maybe("[")
        if not listed and not spec.opener.strip():
            raise MalformedError
        yield from self._python_call()
        while listed and not (yield from self._maybe("]")):
            yield from self._fixed(",")
            yield from self._python_call()
        if listed:
            self._unshown.clear()

    def _python_call(self) -> Pausing:
        name = yield from self._name()
        yield from self._fixed("(")
        self._begin(name)
        seen: set[str] = set()
        while not (yield from self._maybe(")")):
            if seen:
                yield from self._fixed(",")
            key = yield from self._name()
            if key in seen:
                raise MalformedError
            yield from self._fixed("=")
            literal = yield from self._literal()
            self._argue(("{" if not seen else ", ") + json.dumps(key, ensure_ascii=False) + ": " + literal)
            seen.add(key)
        self._argue("}" if seen else "{}")
        self._end_call()

    def _literal(self) -> Generator[None, None, str]:
        """A value, as JSON."""
        scanner = PythonScanner()
        pieces: list[str] = []
        while True:
            pieces.append(self._take(scanner.feed(self._text, self._at)))
            if scanner.done:
                break
            if scanner.failed or self._ended:
                raise MalformedError
            yield
        try:
            return json_of_literal(self._markers.spell("".join(pieces)))
        except ValueError:
            raise MalformedError from None


def _unquoted(escaped: str) -> str:
    """The text of a JSON string."""
    try:
        text = json.loads(f'"{escaped}"')
        text.encode()
    except ValueError:
        raise MalformedError from None
    return str(text)


def _parsed(text: str) -> Any:
    """The value of JSON text, None if it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
