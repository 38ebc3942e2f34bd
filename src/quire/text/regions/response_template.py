"""A checkpoint's own description of its answers: `response_template` of tokenizer_config.json (transformers 5.13)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from quire.text.regions.spec import (
    ArgumentForm,
    CallSpec,
    HeadedCall,
    Hole,
    ObjectCall,
    ReasoningSpec,
    RegionSpec,
    Tags,
)

logger = logging.getLogger("quire.text")

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_NAMED = re.compile(r"\(\?P<(\w+)>((?:[^()\\]|\\.)*)\)")
_LITERAL = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s]|\\n)*")
_SPACE = re.compile(r"\\s[*+]\??")
_TAG_PATTERN = re.compile(
    r"(?P<open>.*?)\(\?P<key>[^()]*\)(?P<middle>.*?)\(\?P<value>[^()]*\)(?P<close>.*)", re.DOTALL
)


class _UnknownError(Exception):
    """The declaration has what no spec says."""


def spec_of_response_template(declared: Mapping[str, Any]) -> RegionSpec | None:
    """The spec that a declaration describes; None, with a warning, for what no spec says."""
    try:
        fields = declared.get("fields")
        if declared.get("version", 1) != 1 or not isinstance(fields, Mapping):
            raise _UnknownError("its version or its fields")
        reasoning = None
        for name in _REASONING_FIELDS:
            if isinstance(field := fields.get(name), Mapping) and reasoning is None:
                opener, closer = _literal(field, "open"), _literal(field, "close")
                channel = "<|channel|>" in opener
                reasoning = ReasoningSpec(
                    name="response_template", opener=opener, closer=closer, channel=channel
                )
        field = fields.get("tool_calls")
        return RegionSpec(_calls(field) if isinstance(field, Mapping) else None, reasoning)
    except _UnknownError as error:
        logger.warning(
            "response_template of tokenizer_config.json is ignored: %s is not supported. The format is found from the "
            "chat template",
            error,
        )
        return None


def _calls(field: Mapping[str, Any]) -> CallSpec:
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    content, options = field.get("content", "text"), field.get("content_args", {})
    if not isinstance(options, Mapping):
        raise _UnknownError("content_args")
    if isinstance(function, Mapping):
        name, arguments = (_path(function.get(key)) for key in ("name", "arguments"))
    else:
        name, arguments = (
            (("content", "name"), ("content", "arguments")) if _path(function) == ("content",) else ((), ())
        )
    if field.get("transform_each"):
        name, arguments = ("content", *name[-1:]), ("content", *arguments[-1:])
    closer = _literal(field, "close", missing="")
    if content == "json" and name[:1] == ("content",) and len(name) == len(arguments) == 2:
        if options.keys() - {"allow_non_json"}:
            raise _UnknownError(f"content_args {sorted(options)}")
        call = ObjectCall(name[1], arguments[1], array=bool(field.get("transform_each")))
        return _spec(call, _literal(field, "open"), closer)
    if len(name) != 1 or arguments != ("content",):
        raise _UnknownError("the transform of tool_calls")
    opener, head = _head(field, name[0])
    if content == "json" and not options.keys() - {"allow_non_json"}:
        return _spec(HeadedCall(head), opener, closer)
    if content == "xml-inline":
        return _spec(HeadedCall(head, closer, ArgumentForm.TAGS, _tags(options)), opener, "")
    raise _UnknownError(f"content {content!r}")


def _spec(call: ObjectCall | HeadedCall, opener: str, closer: str) -> CallSpec:
    return CallSpec(name="response_template", call=call, opener=opener, closer=closer, again="\n", lead="\n")


def _path(placeholder: object) -> tuple[str, ...]:
    """The keys of a placeholder such as {content.name}."""
    match = _PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    return tuple(match.group(1).split(".")) if match else ()


def _literal(field: Mapping[str, Any], key: str, missing: str | None = None) -> str:
    """An opener or closer, as a text."""
    value = field.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, str) and value:
        return value
    written = field.get(f"{key}_pattern")
    if isinstance(written, str):
        text = _unescaped(written)
        if text is not None:
            return text
    elif missing is not None:
        return missing
    raise _UnknownError(f"the {key} of a region")


def _unescaped(written: str) -> str | None:
    """The text that a pattern without choices stands for; white space where any may be."""
    text = ""
    at = 0
    while at < len(written):
        match = _LITERAL.match(written, at)
        piece = match.group() if match else ""
        text += re.sub(r"\\(.)", lambda found: "\n" if found.group(1) == "n" else found.group(1), piece)
        at += len(piece)
        if (space := _SPACE.match(written, at)) is not None:
            text += "\n"
            at = space.end()
        elif at < len(written):
            return None
    return text


def _head(field: Mapping[str, Any], group: str) -> tuple[str, tuple[str | Hole, ...]]:
    """Opener and head of a call whose name is a group of the opening pattern."""
    written = field.get("open_pattern")
    match = _NAMED.search(written) if isinstance(written, str) else None
    if not isinstance(written, str) or match is None or match.group(1) != group:
        raise _UnknownError("the opening pattern of tool_calls")
    before, after = _unescaped(written[: match.start()]), _unescaped(written[match.end() :])
    if before is None or after is None or not before.strip():
        raise _UnknownError("the opening pattern of tool_calls")
    return before, (Hole.NAME, after) if after else (Hole.NAME,)


def _tags(options: Mapping[str, Any]) -> Tags:
    match = _TAG_PATTERN.fullmatch(str(options.get("tag_pattern", "")))
    parts = [_unescaped(match.group(name)) for name in ("open", "middle", "close")] if match else []
    if len(parts) != 3 or not all(part and part.strip() for part in parts):
        raise _UnknownError("tag_pattern")
    return Tags(*(part or "" for part in parts))
