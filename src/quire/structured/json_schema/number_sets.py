"""Sets of numbers: what keywords leave of them, and the texts of the rest as an expression of a terminal.

Texts are decimal, so that a regular expression can compare them. Clients read them as doubles: bounds that exclude
their value begin at the next double, since digits behind the seventeenth would be rounded away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quire.records import dataclass
from quire.structured.json_schema.refusal import MAX_ROOM

ANY_NUMBER = (
    "/-?(?:0|[1-9][0-9]{0,308})(?:\\.[0-9]{1,40})?/"
    " | /-?[1-9](?:\\.[0-9]{1,40})?[eE][+-]?(?:[0-9]|[1-9][0-9]|[12][0-9][0-9]|30[0-7])/"
)
ANY_INTEGER = "/-?(?:0|[1-9][0-9]{0,308})/"
MAX_STEP = 1000  # a lexer may look at a state for each remainder
_SHORT = "[0-9.]{3,16}"  # a text that no double of a shorter text equals
_DIGITS_OF_SUFFIX = 4
# One text of each number: no sign of zero, no zeros at the end, no exponent; fractions that are doubles of their own.
_ONE_TEXT = f"/0|-?[1-9][0-9]{{0,308}}/ | ( /-?(?:0|[1-9][0-9]*)\\.[0-9]*[1-9]/ & /-?{_SHORT}/ )"
_WIDE = Fraction(1, 10**6)  # bounds between which there are MAX_ROOM such fractions


def exact(value: int | float) -> Fraction:
    """The number that a JSON number stands for: the digits that were written, where a double has no others."""
    if isinstance(value, int) or value.is_integer():
        return Fraction(int(value))
    return Fraction(Decimal(repr(value)))


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers within bounds, whole or not whole, that are multiples or not, and are not banned."""

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    whole: bool | None = None
    multiple: Fraction | None = None
    not_multiples: frozenset[Fraction] = frozenset()
    listed: frozenset[Fraction] | None = None
    banned: frozenset[Fraction] = frozenset()

    def has(self, value: Fraction) -> bool:
        """True if a number is in the set, `listed` aside."""
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.whole is not None and (value.denominator == 1) != self.whole:
            return False
        if self.multiple is not None and (value / self.multiple).denominator != 1:
            return False
        return value not in self.banned and all((value / no).denominator != 1 for no in self.not_multiples)

    def values(self, limit: int) -> list[Fraction] | None:
        """All numbers of the set if they are at most `limit`; None for more."""
        if self.listed is not None:
            return [value for value in sorted(self.listed) if self.has(value)]
        if self.low is None or self.high is None:
            return None
        step = self.step()
        if self.low >= self.high or step is None:
            return [one for one in (self.low,) if self.has(one)] if self.low >= self.high else None
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        if last - first + 1 > limit + 2 + len(self.banned):
            return None
        found = [i * step for i in range(first, last + 1) if self.has(i * step)]
        return found if len(found) <= limit else None

    def step(self) -> Fraction | None:
        """What all numbers of the set are multiples of."""
        if self.whole and self.multiple is not None:
            return least_common(self.multiple, Fraction(1))
        return Fraction(1) if self.whole else self.multiple

    def empty(self) -> bool:
        found = self.values(64)
        if found is None and self.whole is False and self.multiple is not None:
            return self.multiple.denominator == 1
        return found == []


def least_common(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(math.lcm(left.numerator, right.numerator), math.gcd(left.denominator, right.denominator))


def gather_numbers(atoms: tuple[tuple[Any, ...], ...]) -> Numbers | None:
    """The numbers that satisfy all atoms; None if bounds or lists contradict each other."""
    low, high, low_open, high_open = None, None, False, False
    whole, multiple, listed = None, None, None
    banned: frozenset[Fraction] = frozenset()
    not_multiples: set[Fraction] = set()
    for kind, *rest in atoms:
        value = rest[0]
        if kind == "low":
            if low is None or (value, rest[1]) > (low, low_open):
                low, low_open = value, rest[1]
        elif kind == "high":
            if high is None or value < high or (value == high and rest[1]):
                high, high_open = value, rest[1]
        elif kind == "whole":
            if whole is not None and whole != value:
                return None
            whole = value
        elif kind == "multiple" and rest[1]:
            multiple = value if multiple is None else least_common(multiple, value)
        elif kind == "multiple":
            not_multiples.add(value)
        elif kind == "in":
            listed = value if listed is None else listed & value
        elif kind == "out":
            banned |= value
    return Numbers(low, high, low_open, high_open, whole, multiple, frozenset(not_multiples), listed, banned)


# Texts


def number_text(value: Fraction) -> str:
    """A number as decimal text: no exponent, no zeros at the end."""
    sign, whole, fraction = ("-" if value < 0 else ""), *_split(abs(value))
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def _split(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point of a number that is not negative."""
    whole, rest = divmod(value, 1)
    places = 0
    while (rest * 10**places).denominator != 1:
        places += 1
    return str(int(whole)), str(int(rest * 10**places)).zfill(places) if places else ""


def number_expression(numbers: Numbers) -> str | None:
    """The texts of a set as an expression of a terminal; None for a set that only `json_number` describes."""
    if numbers == Numbers():
        return ANY_NUMBER
    if numbers == Numbers(whole=True):
        return ANY_INTEGER
    if numbers.listed is not None or (values := numbers.values(32)) is not None:
        values = numbers.values(len(numbers.listed or ()) or 32) or []
        return " | ".join(f'"{number_text(value)}"' for value in values)
    conditions = _conditions(numbers)
    if conditions is None:
        return None
    options = []
    for low, low_open, high, high_open in _intervals(numbers):
        for sign, bounds in _magnitudes(low, low_open, high, high_open):
            negative = bool(sign)
            texts = [str(abs(int(value))) for value in sorted(numbers.banned) if (value < 0) == negative]
            less = [f"~/{'|'.join(texts)}/"] if numbers.whole and texts else []
            options.append(f"{sign}( {' & '.join([*bounds, *conditions, *less])} )")
    return " | ".join(options) or None


def unique_numbers(numbers: Numbers) -> tuple[str, int, bool] | None:
    """One text of each number of a set as an expression, how many they are, at most MAX_ROOM, and whether they may run
    out behind the first digits of one; None if that does not show."""
    expression, values = number_expression(numbers), numbers.values(MAX_ROOM)
    if expression is None:
        return None
    low, high = numbers.low, numbers.high
    if values is None and not numbers.whole and low is not None and high is not None and high - low < _WIDE:
        return None
    endless = numbers.whole and high is None and low is not None and low > 0
    return f"( {expression} ) & ( {_ONE_TEXT} )", MAX_ROOM if values is None else len(values), not endless


def json_number(numbers: Numbers, whitespace: str | None) -> dict[str, object] | None:
    """A schema that llguidance compiles exactly, for multiples that no short expression describes."""
    if numbers.multiple is None or numbers.banned or numbers.not_multiples or numbers.whole is False:
        return None
    step = numbers.step() or numbers.multiple
    if step > MAX_STEP or (step.denominator != 1 and (numbers.low is not None or numbers.high is not None)):
        return None  # llguidance 1.9.1 leaves out numbers between decimal bounds
    if any(bound is not None and abs(bound) >= 2**53 for bound in (numbers.low, numbers.high)):
        return None
    schema: dict[str, object] = {"type": "integer" if step.denominator == 1 else "number"}
    schema["multipleOf"] = int(step) if step.denominator == 1 else float(step)
    for value, is_open, plain, opened in (
        (numbers.low, numbers.low_open, "minimum", "exclusiveMinimum"),
        (numbers.high, numbers.high_open, "maximum", "exclusiveMaximum"),
    ):
        if value is not None:
            schema[opened if is_open else plain] = int(value) if value.denominator == 1 else float(value)
    options: dict[str, object] = {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return {**schema, "x-guidance": options}


Interval = tuple[Fraction | None, bool, Fraction | None, bool]


def _intervals(numbers: Numbers) -> Iterator[Interval]:
    """The parts between banned numbers. Banned integers among integers are left out by their texts instead."""
    cuts = [] if numbers.whole else sorted(value for value in numbers.banned)
    low, low_open = numbers.low, numbers.low_open
    for cut in cuts:
        if (low is None or cut >= low) and (numbers.high is None or cut <= numbers.high):
            if low is None or cut > low:
                yield low, low_open, cut, True
            low, low_open = cut, True
    if low is None or numbers.high is None or low < numbers.high or (low == numbers.high and not low_open):
        yield low, low_open, numbers.high, numbers.high_open


def _nudged(bound: Fraction, is_open: bool, toward: float) -> tuple[Fraction, bool]:
    """A bound that excludes its value as one that includes the next double, where there is one."""
    if not is_open or bound == 0 or abs(bound) >= 2**52:
        return bound, is_open
    return Fraction(Decimal(repr(math.nextafter(float(bound), toward)))), False


def _magnitudes(
    low: Fraction | None, low_open: bool, high: Fraction | None, high_open: bool
) -> Iterator[tuple[str, list[str]]]:
    """Signs, and the bounds of the digits behind each as expressions."""
    if low is not None:
        low, low_open = _nudged(low, low_open, math.inf)
    if high is not None:
        high, high_open = _nudged(high, high_open, -math.inf)
    if high is None or high > 0 or (high == 0 and not high_open):
        bounds = [] if low is None or low < 0 else [_at_least(low, low_open)]
        yield "", bounds + ([] if high is None else [_at_most(high, high_open)])
    if low is None or low < 0:
        bounds = (
            [_at_least(-high, high_open)] if high is not None and high < 0 else [_at_least(Fraction(0), True)]
        )
        yield '"-" ', bounds + ([] if low is None else [_at_most(-low, low_open)])


def _conditions(numbers: Numbers) -> list[str] | None:
    if numbers.whole:
        out = ["/0|[1-9][0-9]{0,308}/"]
    elif numbers.whole is False:
        out = [f"/(?:0|[1-9][0-9]*)\\.[0-9]*[1-9][0-9]*/ & /{_SHORT}/"]
    else:
        out = ["/(?:0|[1-9][0-9]{0,308})(?:\\.[0-9]{1,40})?/"]
    if numbers.multiple is not None:
        texts_of = _multiples(numbers.multiple)
        if texts_of is None:
            return None
        out.append(f"/{texts_of}/")
    for multiple in sorted(numbers.not_multiples):
        texts_of = _multiples(multiple)
        if texts_of is None:
            return None
        out.append(f"~/{texts_of}/")
        if numbers.whole is None:
            out.append(f"/[0-9]+|{_SHORT}/")
    return out


def _multiples(step: Fraction) -> str | None:
    """Texts of multiples of a step that only the last digits decide about."""
    places = len(_split(step)[1])
    scaled = int(step * 10**places)
    if scaled == 1 and places > 0:
        return f"[0-9]+(?:\\.[0-9]{{1,{places}}}0*)?"
    digits = next((k for k in range(_DIGITS_OF_SUFFIX + 1) if 10**k % scaled == 0), None)
    if digits is None or (places and digits > places) or places > _DIGITS_OF_SUFFIX:
        return None
    if places == 0:
        short = "|".join(str(i) for i in range(0, 10**digits, scaled))
        long = "|".join(str(i).zfill(digits) for i in range(0, 10**digits, scaled)) if digits else ""
        return f"(?:{short}|[1-9][0-9]*(?:{long}))(?:\\.0+)?"
    ends = {str(i).zfill(places).rstrip("0") for i in range(0, 10**places, scaled)}
    return f"[0-9]+(?:\\.(?:{'|'.join(sorted(end + '0*' for end in ends if end))}|0+))?"


def _class(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else str(low)


def _whole_at_least(value: int) -> list[str]:
    """Alternatives of the texts of integers from a value on."""
    if value == 0:
        return ["0", "[1-9][0-9]*"]
    digits = str(value)
    options = [f"[1-9][0-9]{{{len(digits)},}}", digits]
    for i, digit in enumerate(digits):
        if digit != "9":
            options.append(f"{digits[:i]}{_class(int(digit) + 1, 9)}[0-9]{{{len(digits) - i - 1}}}")
    return options


def _whole_at_most(value: int) -> list[str]:
    if value == 0:
        return ["0"]
    digits = str(value)
    options = [digits]
    if len(digits) > 1:
        options += ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"]
    for i, digit in enumerate(digits):
        lowest = 1 if i == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            options.append(f"{digits[:i]}{_class(lowest, int(digit) - 1)}[0-9]{{{len(digits) - i - 1}}}")
    return options


def _at_least(value: Fraction, is_open: bool) -> str:
    whole, fraction = _split(value)
    options = [f"(?:{'|'.join(_whole_at_least(int(whole) + 1))})(?:\\.[0-9]+)?"]
    more = [f"{fraction[:i]}{_class(int(d) + 1, 9)}[0-9]*" for i, d in enumerate(fraction) if d != "9"]
    more.append(f"{fraction}[0-9]*[1-9][0-9]*" if is_open else f"{fraction}[0-9]*")
    if fraction or is_open:
        options.append(f"{whole}\\.(?:{'|'.join(more)})")
    else:
        options.append(f"{whole}(?:\\.[0-9]+)?")
    return f"/{'|'.join(options)}/"


def _at_most(value: Fraction, is_open: bool) -> str:
    whole, fraction = _split(value)
    options = []
    if whole != "0":
        options.append(f"(?:{'|'.join(_whole_at_most(int(whole) - 1))})(?:\\.[0-9]+)?")
    less = [f"{fraction[:i]}{_class(0, int(d) - 1)}[0-9]*" for i, d in enumerate(fraction) if d != "0"]
    less += [fraction[:i] for i in range(1, len(fraction))]
    less += [] if is_open else [f"{fraction}0*"]
    if fraction:
        options.append(f"{whole}(?:\\.(?:{'|'.join(less)}))?")
    elif not is_open:
        options.append(f"{whole}(?:\\.0+)?")
    return f"/{'|'.join(options) or '[0-9]{0}x'}/"
