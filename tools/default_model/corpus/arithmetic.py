"""Arithmetic: sums, differences and products with short working, comparisons, word problems.

Working names the place of every digit and writes each carry, so that one column at a time is learned and any number
of columns follows.
"""

from __future__ import annotations

from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .words import FOODS, NAMES, OBJECTS, casual, plural

PLACES = ("Ones", "Tens", "Hundreds", "Thousands")
MAX_DIGITS = 4
SIGNS = {"add": "+", "subtract": "-", "multiply": "×"}

_ASK = {
    "add": (
        "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "Add {a} and {b}.",
        "Calculate {a} + {b}.", "How much is {a} + {b}?", "What is the sum of {a} and {b}?", "Compute {a} plus {b}.",
    ),
    "subtract": (
        "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?",
        "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "Take {b} away from {a}.",
    ),
    "multiply": (
        "What is {a} × {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "What is {a} * {b}?",
        "Multiply {a} by {b}.", "Calculate {a} times {b}.", "{a} x {b} = ?", "What is the product of {a} and {b}?",
    ),
}  # fmt: skip
_STORIES = {
    "add": (
        "{n} has {a} {i} and buys {b} more. How many {i} does {n} have now?",
        "There are {a} {i} in one box and {b} {i} in another. How many {i} are there in all?",
        "{n} counted {a} {i} in the morning and {b} in the evening. How many {i} is that together?",
        "A shop sold {a} {i} on Monday and {b} on Tuesday. How many did it sell over the two days?",
    ),
    "subtract": (
        "{n} had {a} {i} and gave away {b}. How many {i} are left?",
        "There were {a} {i} on the shelf. {n} took {b} of them. How many remain?",
        "A shop had {a} {i} and sold {b}. How many {i} does it still have?",
        "{n} needs {a} {i} and already has {b}. How many more are needed?",
    ),
    "multiply": (
        "{n} has {b} boxes with {a} {i} in each. How many {i} are there in all?",
        "One bag holds {a} {i}. How many {i} are in {b} bags?",
        "{n} packs {a} {i} a day. How many {i} does {n} pack in {b} days?",
    ),
}  # fmt: skip


def operands(draw: Draw, kind: str, digits: int) -> tuple[int, int]:
    """Two numbers, the larger of `digits` digits; no pair is in both splits, in either order."""
    low = 0 if digits == 1 else 10 ** (digits - 1)
    high = 10**digits - 1

    def make() -> tuple[int, int]:
        a = draw.between(low, high)
        if kind == "multiply":
            return a, draw.between(2, 9)
        b = draw.between(low, high) if draw.chance(0.6) else draw.between(1, high)
        return (max(a, b), min(a, b)) if kind == "subtract" else (a, b)

    return draw.held(make, lambda p: f"{kind}:{min(p)}:{max(p)}")


def result(kind: str, a: int, b: int) -> int:
    return a + b if kind == "add" else a - b if kind == "subtract" else a * b


def working(kind: str, a: int, b: int) -> str:
    """The steps before the answer; empty where the answer is one step."""
    if max(a, b) < 10:
        return ""
    if kind == "add":
        return _addition(a, b)
    return _subtraction(a, b) if kind == "subtract" else _multiplication(a, b)


def _digits(number: int) -> list[int]:
    return [int(d) for d in reversed(str(number))]


def _addition(a: int, b: int) -> str:
    left, right = _digits(a), _digits(b)
    lines, carry = [], 0
    for i in range(max(len(left), len(right))):
        x = left[i] if i < len(left) else 0
        y = right[i] if i < len(right) else 0
        total = x + y + carry
        extra = f"+{carry}" if carry else ""
        carry = total // 10
        end = f", carry {carry}" if carry else ""
        lines.append(f"{PLACES[i]}: {x}+{y}{extra}={total}, write {total % 10}{end}.")
    if carry:
        lines.append(f"Then write {carry}.")
    return "\n".join(lines)


def _subtraction(a: int, b: int) -> str:
    left, right = _digits(a), _digits(b)
    lines, borrow = [], 0
    for i, x in enumerate(left):
        y = right[i] if i < len(right) else 0
        taken = f"-{borrow}" if borrow else ""
        top = x - borrow
        borrow = 1 if top < y else 0
        end = ", borrow 1" if borrow else ""
        shown = f"{x + 10 * borrow}-{y}{taken}={top + 10 * borrow - y}"
        lines.append(f"{PLACES[i]}: {shown}, write {top + 10 * borrow - y}{end}.")
    return "\n".join(lines)


def _multiplication(a: int, b: int) -> str:
    lines, carry = [], 0
    for i, x in enumerate(_digits(a)):
        total = x * b + carry
        extra = f", {x * b}+{carry}={total}" if carry else ""
        carry = total // 10
        end = f", carry {carry}" if carry else ""
        lines.append(f"{PLACES[i]}: {x}×{b}={x * b}{extra}, write {total % 10}{end}.")
    if carry:
        lines.append(f"Then write {carry}.")
    return "\n".join(lines)


def answer(kind: str, a: int, b: int) -> str:
    """Working, then the equation with the result."""
    steps = working(kind, a, b)
    end = f"{a} {SIGNS[kind]} {b} = {result(kind, a, b)}"
    return f"{steps}\nSo {end}." if steps else f"{end}."


def number_check(kind: str, a: int, b: int) -> Check:
    data = {"value": result(kind, a, b), "task": kind, "digits": len(str(max(a, b)))}
    return Check("number", data)


def _sum(draw: Draw, kind: str, digits: int) -> list[Turn]:
    a, b = operands(draw, kind, digits)
    ask = casual(draw, draw.pick(_ASK[kind]).format(a=a, b=b))
    return [user(ask), assistant(answer(kind, a, b), number_check(kind, a, b))]


def _short(draw: Draw, kind: str) -> list[Turn]:
    """The result alone, for what fits in one step."""
    a, b = operands(draw, kind, 1 if kind == "multiply" else draw.between(1, 2))
    ask = draw.pick(_ASK[kind]).format(a=a, b=b).rstrip(".")
    tail = draw.pick(
        ("Answer with the number only.", "Just the number, please.", "Reply with only the number.")
    )
    value = result(kind, a, b)
    check = Check("exact", {"text": str(value), "task": f"short {kind}"})
    return [user(f"{ask} {tail}" if ask[-1] == "?" else f"{ask}. {tail}"), assistant(str(value), check)]


def _word_problem(draw: Draw, kind: str, digits: int) -> list[Turn]:
    a, b = operands(draw, kind, digits)
    item = plural(draw.pick(FOODS + OBJECTS))
    ask = draw.pick(_STORIES[kind]).format(n=draw.pick(NAMES), i=item, a=a, b=b)
    end = f"The answer is {result(kind, a, b)} {item}."
    return [user(ask), assistant(f"{answer(kind, a, b)}\n{end}", number_check(kind, a, b))]


def _compare(draw: Draw) -> list[Turn]:
    a, b = operands(draw, "compare", draw.between(1, MAX_DIGITS))
    larger = draw.chance(0.5)
    word = draw.pick(("larger", "bigger", "greater")) if larger else draw.pick(("smaller", "less"))
    ask = draw.pick(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?")).format(
        w=word, a=a, b=b
    )
    if a == b:
        return [user(ask), assistant(f"They are equal: both are {a}.")]
    value = max(a, b) if larger else min(a, b)
    other = a + b - value
    said = f"{value} is {word} than {other}."
    check = Check("first_number", {"value": value, "task": "compare"})
    return [user(casual(draw, ask)), assistant(said, check)]


def make(draw: Draw) -> Conversation:
    """One arithmetic question, sometimes with a second one after it."""
    turns: list[Turn] = []
    for _ in range(draw.weighted(((1, 0.8), (2, 0.15), (3, 0.05)))):
        kind = draw.weighted((("add", 0.4), ("subtract", 0.35), ("multiply", 0.25)))
        digits = draw.weighted(((1, 0.2), (2, 0.35), (3, 0.3), (4, 0.15)))
        form = draw.weighted((("sum", 0.6), ("word", 0.2), ("short", 0.12), ("compare", 0.08)))
        digits = min(digits, 3) if kind == "multiply" else digits
        if form == "sum":
            turns += _sum(draw, kind, digits)
        elif form == "word":
            turns += _word_problem(draw, kind, max(digits, 1))
        elif form == "short":
            turns += _short(draw, kind)
        else:
            turns += _compare(draw)
    return Conversation("arithmetic", turns)
