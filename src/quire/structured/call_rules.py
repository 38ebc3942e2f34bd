"""Rules of llguidance's Lark for the calls of each form in `text.regions.spec`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.records import dataclass
from quire.structured.ask import JSON_SPACE
from quire.text.regions.argument_types import resolve, value_types
from quire.text.regions.arriving import is_key, is_name
from quire.text.regions.markers import Markers
from quire.text.regions.spec import (
    ArgumentForm,
    CallIds,
    CallSpec,
    ChannelCall,
    HeadedCall,
    Hole,
    ObjectCall,
    PythonCall,
    Tags,
)
from quire.types import RequestError

# A JSON schema and whether it is strict -> a grammar of llguidance, and the keywords that were dropped.
CompileSchema = Callable[[object, bool], tuple[str, Sequence[str]]]

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
# Keywords of a schema of arguments that a format which writes them one by one can enforce, or need not.
_ONE_BY_ONE = frozenset(
    ("$schema", "$id", "$comment", *_DEFINITIONS, "type", "properties", "required", "title", "description", "examples")
)  # fmt: skip
_STRING_KEYWORDS = frozenset(
    (
        "type",
        "enum",
        "const",
        "minLength",
        "maxLength",
        "pattern",
        "title",
        "description",
        "default",
        "examples",
    )
)


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that may be called. `parameters` is the JSON schema of its arguments; `strict` refuses a schema that
    cannot be enforced in every keyword.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments, which are always an object."""
        if self.parameters is None or self.parameters is False:
            return _NO_PARAMETERS
        given = {} if self.parameters is True else self.parameters
        return given if given.get("type") == "object" else {**given, "type": "object"}


class Lark:
    """A grammar that grows: its rules, and grammars beside it that rules refer to."""

    def __init__(self, markers: Markers, compile_schema: CompileSchema) -> None:
        self.markers = markers
        self.dropped: list[str] = []
        self._compile = compile_schema
        self._rules: dict[str, str] = {}
        self._beside: list[dict[str, Any]] = []

    def literal(self, text: str) -> str:
        """A text of the spec: strings and tokens."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in self.markers.split(text)
        )

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule, or a terminal with a name in capitals; an equal body needs no second one."""
        base, number = name, 1
        while self._rules.get(name + options, body) != body:
            number += 1
            name = f"{base}_{number}"
        self._rules[name + options] = body
        return name

    def schema(self, schema: object, tool: ToolFunction) -> str:
        """A reference to the grammar of a JSON schema."""
        source, dropped = self._compile(schema, tool.strict)
        self.dropped += [f"{tool.name}: {keyword}" for keyword in dropped]
        return self.embed(source)

    def embed(self, source: str) -> str:
        """A reference to a grammar of llguidance."""
        plain = not source.lstrip().startswith("{")
        grammars = [{"lark_grammar": source}] if plain else json.loads(source)["grammars"]
        first = len(self._beside)
        names = {str(grammar.get("name", "")): f"g{first + place}" for place, grammar in enumerate(grammars)}
        inner = sorted(filter(None, names), key=len, reverse=True)
        references = re.compile(f"@({'|'.join(map(re.escape, inner))})(?![\\w-])") if inner else None
        for place, grammar in enumerate(grammars):
            made = {**grammar, "name": f"g{first + place}"}
            if references is not None and "lark_grammar" in made:
                made["lark_grammar"] = references.sub(
                    lambda match: f"@{names[match.group(1)]}", made["lark_grammar"]
                )
            self._beside.append(made)
        return f"@g{first}"

    def source(self, start: str) -> str:
        """The whole grammar, in the serialized form of llguidance."""
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._beside]})


class CallRules:
    """The rules of calls in one spec. `one` is a call of a function, `regions` a text of one call or several.

    `beside`: JSON may stand in the place of calls. Calls that are spelled begin with the terminals of JSON then: a
    lexer takes the longest, so a longer one would hide those.
    """

    def __init__(self, lark: Lark, spec: CallSpec, *, beside: bool = False) -> None:
        self._lark, self._spec = lark, spec
        self._beside = beside and not spec.opener.strip()

    def region(self, tools: Sequence[ToolFunction], parallel: bool, behind: str = "") -> str:
        """One region of calls, but for `behind`, the start of it that is there already."""
        lark, spec, call = self._lark, self._spec, self._spec.call
        one = first = lark.rule("call", " | ".join(self._one(tool) for tool in tools))
        opener = lark.literal(spec.opener.removeprefix(behind))
        closer = lark.literal(spec.closer)
        if isinstance(call, ObjectCall) and call.array:
            start, between, end = call.layout
            opener, closer = f"{opener} {quoted(start)}", f"{quoted(end)} {closer}"
        elif isinstance(call, PythonCall) and self._beside:
            between, opener, closer = ", ", f'{opener} "["', f'"]" {closer}'
        elif isinstance(call, PythonCall):
            between, closer = ", ", f'"]" {closer}'
            # the bracket and the name are one text, so that an answer may begin with another bracket
            first = lark.rule("first_call", " | ".join(self._one(tool, "[") for tool in tools))
        elif isinstance(call, ChannelCall):
            between = None
        else:
            between = spec.between
        if parallel and between is not None:
            first = f"{first} ({lark.literal(between)} {one})*"
        return f"{opener} {first} {closer}"

    def regions(self, tools: Sequence[ToolFunction], parallel: bool) -> str:
        """All calls of an answer, of which there is at least one."""
        region = self._lark.rule("region", self.region(tools, parallel))
        repeats = self._spec.between is None and not _is_listed(self._spec.call)
        if parallel and repeats:
            return f"{region} ({self._lark.literal(self._spec.again)} {region})*"
        return region

    def _one(self, tool: ToolFunction, before: str = "") -> str:
        """A call of a function, behind a text."""
        lark, call = self._lark, self._spec.call
        if not is_name(tool.name):
            raise RequestError(
                "tools", f"the function name {tool.name!r} cannot be written in this model's calls"
            )
        if isinstance(call, ObjectCall) and self._beside:
            return self._json_object(call, tool)
        if isinstance(call, ObjectCall):
            written_id = (
                f'{quoted(f"{json.dumps(call.id)}: ")} WRITTEN_ID ", "'
                if call.id and call.name != "name"
                else ""
            )
            if written_id:
                lark.rule("WRITTEN_ID", r'/"[0-9]{1,3}"/')
            name = quoted(f"{json.dumps(call.name)}: {json.dumps(tool.name)}, {json.dumps(call.arguments)}: ")
            return f'"{{" {written_id} {name} {lark.schema(tool.schema, tool)} "}}"'
        if isinstance(call, PythonCall):
            return f'{quoted(before + tool.name + "(")} {self._python_arguments(tool)} ")"'
        if isinstance(call, ChannelCall):
            head = f" to=functions.{tool.name} <|constrain|>json<|message|>"
            return f"{lark.literal(head)} {lark.schema(tool.schema, tool)}"
        head = " ".join(self._head(call, tool))
        if call.arguments is ArgumentForm.TAGS and call.tags is not None:
            return f"{head} {self._tagged(tool, call.tags)} {lark.literal(call.tail)}"
        return f"{head} {lark.schema(tool.schema, tool)} {lark.literal(call.tail)}"

    def _json_object(self, call: ObjectCall, tool: ToolFunction) -> str:
        """A call with the terminals and the white space that JSON of a schema has."""
        fields = {
            call.name: quoted(json.dumps(tool.name)),
            call.arguments: self._lark.schema(tool.schema, tool),
        }
        pairs = ' "," '.join(f'{quoted(json.dumps(key))} ":" {value}' for key, value in fields.items())
        return self._lark.embed(
            f'%llguidance {{"ignore_once": true}}\n%ignore /{JSON_SPACE}/\nstart: "{{" {pairs} "}}"'
        )

    def _head(self, call: HeadedCall, tool: ToolFunction) -> Iterable[str]:
        for part in call.head:
            if isinstance(part, tuple):
                if isinstance(part[0], str) and part[0] in self._lark.markers.ids:
                    yield f"({' '.join(self._part(piece, tool) for piece in part)})?"
            else:
                yield self._part(part, tool)

    def _part(self, part: str | Hole, tool: ToolFunction) -> str:
        if isinstance(part, str):
            return self._lark.literal(part)
        if part is Hole.NAME:
            return quoted(tool.name)
        if self._spec.ids is CallIds.INDEXED:
            return f"{quoted(f'functions.{tool.name}:')} {self._lark.rule('INDEX', '/[0-9]{1,4}/')}"
        return self._lark.rule("NEW_ID", "/[a-zA-Z0-9]{9}/")

    # -- arguments one by one ----------------------------------------------------------------------

    def _arguments(self, tool: ToolFunction) -> list[tuple[str, object, bool]]:
        """Name, schema with the definitions it may refer to, and whether it is required, of each argument."""
        schema = tool.schema
        self._refuse(tool, schema, _ONE_BY_ONE | {"additionalProperties"}, "the arguments")
        if schema.get("additionalProperties") not in (None, True, False):
            self._drop(tool, "additionalProperties")
        properties = schema.get("properties")
        properties = dict(properties) if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        for name in required:
            properties.setdefault(name, True)
        definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
        return [
            (name, {**value, **definitions} if isinstance(value, Mapping) and definitions else value, name in required)
            for name, value in properties.items()
        ]  # fmt: skip

    def _refuse(
        self, tool: ToolFunction, schema: Mapping[str, Any], known: frozenset[str], what: str
    ) -> None:
        for keyword in schema:
            if keyword not in known:
                self._drop(tool, f"{keyword} of {what}")

    def _drop(self, tool: ToolFunction, keyword: str) -> None:
        """A keyword that the format cannot enforce: refused if the function is strict."""
        if tool.strict:
            raise RequestError(
                "tools",
                f"{tool.name}: strict cannot be kept, since this model's format of calls cannot enforce {keyword}",
            )
        self._lark.dropped.append(f"{tool.name}: {keyword}")

    def _tagged(self, tool: ToolFunction, tags: Tags) -> str:
        lark = self._lark
        pieces = []
        for name, schema, required in self._arguments(tool):
            if not is_key(name):
                raise RequestError(
                    "tools",
                    f"{tool.name}: the argument name {name!r} cannot be written in this model's calls",
                )
            head = lark.literal(tags.open + name + tags.middle)
            piece = f"{head} {self._tag_value(tool, name, schema, tags)}"
            pieces.append(piece if required else f"({piece})?")
        return " ".join(pieces)

    def _tag_value(self, tool: ToolFunction, name: str, schema: object, tags: Tags) -> str:
        """A value and its closing tag. A string is plain text, which ends at the first closing tag."""
        lark = self._lark
        root = schema if isinstance(schema, Mapping) else {}
        found = resolve(schema, root)
        types = value_types(schema, root)
        if types and "string" not in types:
            return f"{lark.schema(schema, tool)} {lark.literal(tags.close)}"
        if isinstance(found, Mapping):
            known = _STRING_KEYWORDS | set(_DEFINITIONS) if types == {"string"} else {"type", *_DEFINITIONS}
            self._refuse(
                tool, found, frozenset(known) | {"title", "description", "default"}, f"the argument {name!r}"
            )
        choices = (
            found.get("enum", [found["const"]] if "const" in found else None)
            if isinstance(found, Mapping)
            else None
        )
        if types == {"string"} and isinstance(choices, list):
            texts = [
                choice for choice in choices if isinstance(choice, str) and tags.close.strip() not in choice
            ]
            return f"({' | '.join(quoted(text) for text in texts)}) {lark.literal(tags.close)}"
        text = _text_pattern(
            found if types == {"string"} and isinstance(found, Mapping) else {}, tags.close.strip()
        )
        value = lark.rule("VALUE", text)
        before, *rest = lark.markers.split(tags.close)
        if isinstance(before, int):
            return f"{value} {lark.literal(tags.close)}"
        whole = lark.rule(f"{value}_END", f"{value} {quoted(before)}")
        if rest:  # a token ends the text
            return f"{whole} {lark.literal(tags.close.removeprefix(before))}"
        return lark.rule(whole.lower(), whole, "[lazy]")

    def _python_arguments(self, tool: ToolFunction) -> str:
        """Keyword arguments in the order of the schema, with commas between those that are there."""
        lark = self._lark
        rest = ""  # what may follow an argument, from here on
        first = ""  # what may be written if no argument is there yet
        for name, schema, required in reversed(self._arguments(tool)):
            if not (name.isidentifier() and is_name(name)):
                raise RequestError(
                    "tools",
                    f"{tool.name}: the argument name {name!r} is not a Python identifier, as this model's calls need",
                )
            value = f"{quoted(name + '=')} {self._python_value(tool, schema)}"
            first = (
                f"{value} {rest}"
                if required
                else f"({value} {rest} | {first})"
                if first
                else f"({value} {rest})?"
            )
            rest = lark.rule(
                f"rest_{_plain(tool.name)}", f'", " {value} {rest}' if required else f'(", " {value})? {rest}'
            )
        return first

    def _python_value(self, tool: ToolFunction, schema: object) -> str:
        if (
            isinstance(schema, Mapping)
            and schema.get("type") == "boolean"
            and not {"enum", "const"} & schema.keys()
        ):
            return '("True" | "False")'
        return self._lark.schema(schema, tool)


def quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def pattern(text: str) -> str:
    """A text as a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/")


def _text_pattern(schema: Mapping[str, Any], close: str) -> str:
    """A terminal for text that fits the schema of a string and does not hold `close`."""
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [f"/(?s:.{{{low},{high}}})/", f"~/(?s:.*){pattern(close)}(?s:.*)/"]
    if isinstance(schema.get("pattern"), str):
        body = schema["pattern"].replace("/", "\\/")
        parts.append(f"/(?s:.*)({body})(?s:.*)/" if not body.startswith("^") else f"/({body[1:]})(?s:.*)/")
    return " & ".join(parts)


def _is_listed(call: object) -> bool:
    return isinstance(call, PythonCall) or (isinstance(call, ObjectCall) and call.array)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9_]", "_", text.lower())
