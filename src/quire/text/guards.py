"""Size estimates for operations that can produce large outputs: padding, repetition, formats, joins."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from string import Formatter
from typing import Any

from quire.text.meter import LimitExceededError, Meter
from quire.text.provenance import TemplateText, concat, own_of, percent

Arguments = tuple[Any, ...]

MAX_JSON_INDENT = 32
# Methods of str that CPython runs in time (length of the text) x (length of the argument).
_QUADRATIC_METHODS = frozenset(("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"))
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


def binary(meter: Meter, operation: str, left: Any, right: Any) -> Any:
    """`left operation right` for the four operations that can grow without bound: + * ** %."""
    if operation == "+":
        if isinstance(left, str) and isinstance(right, str):
            meter.text(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            meter.items(len(left) + len(right))
        else:
            meter.spend()
        return operator.add(left, right)
    if operation == "*":
        _repeat(meter, left, right)
        return operator.mul(left, right)
    if operation == "**":
        if isinstance(left, int) and isinstance(right, int) and right > 0:
            meter.bits(left.bit_length() * right)
        meter.spend()
        return operator.pow(left, right)
    meter.spend()
    if isinstance(left, str):
        check_percent(meter, left, right)
        result: Any = percent(left, right)
    else:
        result = operator.mod(left, right)
    meter.result(result)
    return result


def _repeat(meter: Meter, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        meter.bits(left.bit_length() + right.bit_length())
        meter.spend()
        return
    if isinstance(left, int):
        left, right = right, left
    times = max(right, 0) if isinstance(right, int) else 1
    if isinstance(left, str):
        meter.text(len(left) * times)
    elif isinstance(left, list | tuple):
        meter.items(len(left) * times)
    else:
        meter.spend()


def check_percent(meter: Meter, template: str, values: Any) -> None:
    """Check a printf-style format: its widths, and the size of its output."""
    conversions = 0
    for width in _conversion_widths(template):
        if width is None:
            raise LimitExceededError("it used a format width from a value (*)")
        meter.width(width)
        conversions += 1
    largest = meter.deep(values)
    meter.text(len(template) + conversions * (largest + meter.limits.width if conversions else 0))


def _conversion_widths(template: str) -> Iterable[int | None]:
    """For each % conversion the larger of its width and precision, None if one is *."""
    position = template.find("%")
    while position >= 0:
        position += 1
        if template.startswith("(", position):  # a mapping key, parentheses nest
            depth = 0
            while position < len(template):
                depth += (template[position] == "(") - (template[position] == ")")
                position += 1
                if not depth:
                    break
        start = position
        while position < len(template) and template[position] in "#0- +.*hlL123456789":
            position += 1
        field = template[start:position]
        if "*" in field:
            yield None
        else:
            digits = "".join(char if char.isdigit() else " " for char in field).split()
            yield max((int(number[:20]) for number in digits), default=0)
        position = template.find("%", position + 1)


class MeteredFormatter(Formatter):
    """str.format whose attribute access goes through the sandbox and whose widths and output are bounded."""

    def __init__(self, meter: Meter, get: Callable[[Any, str, bool], Any]) -> None:
        self._meter = meter
        self._get = get  # (object, name, is an attribute) -> value, under the rules of the sandbox
        self._template = ""
        self._parts: list[str] = []

    def format_text(self, template: str, args: Any, kwargs: Any) -> str:
        """The formatted text; the characters that the template wrote stay known."""
        self._template = template
        text = self.vformat(template, args, kwargs)
        followed = concat(self._parts)
        return followed if followed == text else text  # fields inside the format of a field are not followed

    def parse(self, format_string: str) -> Iterable[Any]:
        outer = format_string is self._template  # else it is the format of a field
        own = outer and all(own_of(format_string))
        for literal, *field in super().parse(format_string):
            if outer:
                self._parts.append(TemplateText(literal) if own else literal)
            yield literal, *field

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, rest = _split_field_name(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._get(value, name, is_attribute)
        return value, first

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        self._meter.deep(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        digits = "".join(char if char.isdigit() else " " for char in format_spec).split()
        for number in digits:
            self._meter.width(int(number[:20]))
        self._meter.deep(value)
        text = str(super().format_field(value, format_spec))
        self._meter.text(len(text))
        self._parts.append(text)
        return text


def _split_field_name(name: str) -> tuple[Any, Iterable[tuple[bool, Any]]]:
    # What string.Formatter itself uses; jinja2's own sandbox imports it the same way.
    from _string import formatter_field_name_split  # type: ignore[import-not-found]

    first, rest = formatter_field_name_split(name)
    return first, rest


def string_method(meter: Meter, text: str, name: str, args: Arguments, kwargs: dict[str, Any]) -> Arguments:
    """Check a call of a str method before it runs; returns the arguments to call it with."""
    meter.spend(1 + len(text) // 16)
    if name in ("center", "ljust", "rjust", "zfill"):
        meter.width(_int(args, 0))
    elif name == "expandtabs":
        tab = max(_int(args, 0), kwargs.get("tabsize", 8) if isinstance(kwargs.get("tabsize"), int) else 8)
        meter.width(tab)
        meter.text(len(text) + text.count("\t") * tab)
    elif name in _QUADRATIC_METHODS and args and isinstance(args[0], str):
        meter.spend(len(text) * len(args[0]) // 256)
    if name == "replace" and len(args) >= 2:
        _replace(meter, text, args[0], args[1])
    elif name == "join" and args:
        args = (joinable(meter, text, args[0]), *args[1:])
    elif name in ("split", "rsplit") and args and isinstance(args[0], str) and args[0]:
        _pieces(meter, text, text.count(args[0]) + 1)
    elif name in ("split", "rsplit", "splitlines"):
        _pieces(meter, text, 1 + sum(map(text.count, _SPACES)))
    return args


def _pieces(meter: Meter, text: str, count: int) -> None:
    """Account for splitting a text. Each piece of a template's own text is an object of about 150 bytes."""
    meter.items(count)
    if isinstance(text, TemplateText):
        meter.spend(count)


def joinable(meter: Meter, separator: str, items: Any) -> Any:
    """The items of a join as a list whose joined size is within bounds."""
    if isinstance(items, Iterable) and not isinstance(items, str | list | tuple | dict):
        items = list(meter.each(items))
    chars = meter.deep(items)
    if isinstance(items, str):
        _pieces(meter, items, len(items))
    count = len(items) if isinstance(items, str | list | tuple | dict) else 1
    meter.text(chars + count * len(separator))
    return items


def _replace(meter: Meter, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        meter.text(len(text) + times * max(len(new) - len(old), 0))


def _int(args: Arguments, index: int) -> int:
    return args[index] if len(args) > index and isinstance(args[index], int) else 0


# -- filters: checks by name, given the value and the remaining arguments --------------------------


def _trim(meter: Meter, value: Any, chars: Any = None) -> None:
    size = meter.deep(value)
    if isinstance(chars, str):
        meter.spend(size * len(chars) // 256)


def _integer(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        meter.width(len(value))
    meter.spend()


def _listed(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    """For filters that list the characters or words of a text."""
    if isinstance(value, str):
        _pieces(meter, value, len(value))
    meter.result(value)


def _center(meter: Meter, value: Any, width: Any = 80) -> None:
    meter.deep(value)
    if isinstance(width, int):
        meter.width(width)


def _indent(meter: Meter, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    chars = meter.deep(value)
    step = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
    meter.width(step)
    lines = value.count("\n") + 1 if isinstance(value, str) else 1
    meter.text(chars + lines * max(step, 0))


def _replace_filter(meter: Meter, value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    meter.deep(value)
    if isinstance(value, str):
        _replace(meter, value, old, new)


def _format(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    check_percent(meter, str(value), kwargs or args)


def _batch(meter: Meter, value: Any, linecount: Any, *_: Any, **__: Any) -> None:
    _listed(meter, value)
    if isinstance(linecount, int):
        meter.items(linecount)


def _round(meter: Meter, _value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    meter.spend()
    if isinstance(precision, int) and not -400 <= precision <= 400:
        raise LimitExceededError(f"it rounded to {precision} digits")


def _sorted(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    _listed(meter, value)
    meter.deep(value)


def _sum(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    _listed(meter, value)
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    if not isinstance(start, int | float):
        raise LimitExceededError("it summed something other than numbers")


def _tojson(meter: Meter, value: Any, *args: Any, **kwargs: Any) -> None:
    chars = meter.deep(value)
    elements = 1 + chars // 4
    for option in (*args, *kwargs.values()):
        if isinstance(option, bool) or option is None:
            continue
        if isinstance(option, int):
            if option > MAX_JSON_INDENT:
                raise LimitExceededError(
                    f"it indented JSON by {option}, more than the limit of {MAX_JSON_INDENT}"
                )
            if option > 0:
                meter.text(chars + _lines_times_depth(meter, value) * option)
        elif isinstance(option, str):
            meter.width(len(option))
            meter.text(chars + _lines_times_depth(meter, value) * len(option))
        else:
            meter.text(chars + elements * meter.deep(option))


def _lines_times_depth(meter: Meter, value: Any) -> int:
    """The sum of the depths of all elements, which is the cost of indentation in JSON."""
    total, depth, level = 0, 0, [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for node in level:
            if isinstance(node, list | tuple | dict):
                meter.spend(1 + len(node))
                total += (len(node) + 1) * depth
                inner.extend(node.values() if isinstance(node, dict) else node)
        level = inner
    return total


def _join(meter: Meter, value: Any, d: Any = "", *_: Any, **__: Any) -> None:
    joinable(meter, d if isinstance(d, str) else "", value)


FILTERS: dict[str, Callable[..., None]] = {
    "join": _join,
    "trim": _trim,
    "int": _integer,
    "list": _listed,
    "title": _listed,
    "wordcount": _listed,
    "sort": _sorted,
    "unique": _sorted,
    "groupby": _sorted,
    "max": _sorted,
    "min": _sorted,
    "center": _center,
    "indent": _indent,
    "replace": _replace_filter,
    "format": _format,
    "batch": _batch,
    "slice": _batch,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
}

# Filters whose cost does not depend on the value, and filters that visit a list but not its elements.
CONSTANT_FILTERS = frozenset(
    ("abs", "attr", "count", "d", "default", "first", "float", "last", "length", "safe")
)
SHALLOW_FILTERS = frozenset(("items", "map", "reject", "rejectattr", "reverse", "select", "selectattr"))
# Filters that read an iterator to its end: it is made a list first, so that its size is known.
CONSUMING_FILTERS = frozenset(
    ("batch", "dictsort", "groupby", "join", "max", "min", "slice", "sort", "sum", "unique")
)
