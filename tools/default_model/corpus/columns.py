"""Sums column by column: the working of what is too large to be said at once.

Every line names the place of its digits, and its last digit is a digit of the result, so that one column at a time is
learned and any number of columns follows.
"""

from __future__ import annotations

PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")
SIGNS = {"add": "+", "subtract": "-", "multiply": "×", "divide": "/"}


def equation(kind: str, a: int, b: int) -> str:
    """ "7 + 8 = 15", with the remainder of a division."""
    if kind == "divide":
        rest = a % b
        return f"{a} / {b} = {a // b}" + (f" remainder {rest}" if rest else "")
    return f"{a} {SIGNS[kind]} {b} = {result(kind, a, b)}"


def result(kind: str, a: int, b: int) -> int:
    """The number that the operation gives; of a division without its remainder."""
    if kind == "add":
        return a + b
    return a - b if kind == "subtract" else a * b if kind == "multiply" else a // b


def working(kind: str, a: int, b: int) -> str:
    """The lines before the answer; empty where the answer is one step."""
    if is_direct(kind, a, b):
        return ""
    if kind == "add":
        return _addition(a, b)
    if kind == "subtract":
        if a < b:
            return f"{b} is larger, so turn it round.\n{_subtraction(b, a)}\n{equation(kind, b, a)}"
        return _subtraction(a, b)
    if kind == "divide":
        return _division(a, b)
    a, b = max(a, b), min(a, b)
    return _multiplication(a, b) if b < 10 else _long_multiplication(a, b)


def answer(kind: str, a: int, b: int) -> str:
    """Working where it is needed, then the equation."""
    steps = working(kind, a, b)
    end = equation(kind, a, b)
    return f"{steps}\nSo {end}." if steps else f"{end}."


def is_direct(kind: str, a: int, b: int) -> bool:
    """Whether the result is said without working: two digits, tables, round numbers."""
    low, high = min(a, b), max(a, b)
    if kind in {"add", "subtract"}:
        return high <= 100 or (_round(a, 100) and _round(b, 100)) or (_round(a, 1000) and _round(b, 1000))
    if kind == "multiply":
        powers = {0, 1, 10, 100, 1000}
        return (
            high <= 12 or bool({a, b} & powers) or (low == 2 and high <= 100) or (_single(a) and _single(b))
        )
    return (a <= 100 and b <= 12) or (a <= 144 and b <= 12 and a % b == 0) or _round_division(a, b)


def _round(number: int, unit: int) -> bool:
    return number % unit == 0 and number <= 10 * unit


def _single(number: int) -> bool:
    """One digit, then zeros."""
    return not str(number)[1:].strip("0")


def _round_division(a: int, b: int) -> bool:
    """100 / 20, 600 / 3, 250 / 10: known from the tables once the zeros are away."""
    if a % b:
        return False
    return (_single(a) and _single(b)) or b in {1, 10, 100, 1000} or (b == 2 and a <= 200) or a == b


def _digits(number: int) -> list[int]:
    return [int(d) for d in reversed(str(number))]


def _addition(a: int, b: int) -> str:
    left, right = _digits(a), _digits(b)
    lines, carry = [], 0
    for i in range(max(len(left), len(right))):
        x = left[i] if i < len(left) else 0
        y = right[i] if i < len(right) else 0
        lines.append(f"{PLACES[i]}: {x}+{y}{'+1' if carry else ''}={x + y + carry}")
        carry = (x + y + carry) // 10
    return "\n".join(lines)


def _subtraction(a: int, b: int) -> str:
    """A digit that is too small gets ten more, which the next column gives back."""
    left, right = _digits(a), _digits(b)
    lines, borrow = [], 0
    for i, x in enumerate(left):
        y = right[i] if i < len(right) else 0
        taken = "-1" if borrow else ""
        ten = 10 if x - borrow < y else 0
        lines.append(f"{PLACES[i]}: {x + ten}-{y}{taken}={x + ten - y - borrow}")
        borrow = ten // 10
    return "\n".join(lines)


def _multiplication(a: int, b: int) -> str:
    lines, carry = [], 0
    for i, x in enumerate(_digits(a)):
        lines.append(f"{PLACES[i]}: {x}×{b}{f'+{carry}' if carry else ''}={x * b + carry}")
        carry = (x * b + carry) // 10
    return "\n".join(lines)


def _long_multiplication(a: int, b: int) -> str:
    """Two digits by two digits: the ones, the tens, then their sum."""
    tens, ones = b // 10 * 10, b % 10
    by_tens = f"{_multiplication(a, tens // 10)}\n{a} × {tens} = {a * tens}"
    if not ones:
        return by_tens.rsplit("\n", 1)[0]
    by_ones = f"{_multiplication(a, ones)}\n{a} × {ones} = {a * ones}"
    return f"{by_ones}\n{by_tens}\n{_addition(a * tens, a * ones)}"


def _division(a: int, b: int) -> str:
    """From the left: what is left over stands before the next digit."""
    lines, rest = [], 0
    for digit in str(a):
        part = 10 * rest + int(digit)
        rest = part % b
        lines.append(f"{part}/{b}={part // b}" + (f" rest {rest}" if rest else ""))
    return "\n".join(lines)
