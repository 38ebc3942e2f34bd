"""Arithmetic in many wordings: sums, tables, percents, comparisons, sequences, word problems, and what is too hard."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from .columns import SIGNS, answer, equation, is_direct, result
from .conversation import Check, Conversation, Turn, assistant, user
from .draw import Draw
from .tasks import answered, pairs, request, sections, words
from .wording import ask, word
from .words import NAMES, NUMBERS

_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_PERCENTS = (1, 5, 10, 10, 15, 20, 20, 25, 30, 40, 50, 50, 60, 70, 75, 80, 90, 100)


def number_word(number: int) -> str:
    """A number below 100, or 100, as a word."""
    if number >= 100:
        return "a hundred"
    if number < 20:
        return NUMBERS[number]
    tens = _TENS[number // 10]
    return f"{tens}-{NUMBERS[number % 10]}" if number % 10 else tens


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


def _held(draw: Draw, kind: str, make: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """Facts of the tables are in both splits, in different wordings; other pairs are in one."""
    pair = make()
    if max(pair) <= 12 or (kind in {"multiply", "divide"} and is_direct(kind, *pair)):
        return pair
    return draw.held(make, lambda p: f"{kind}:{min(p)}:{max(p)}")


def _small(draw: Draw, kind: str) -> tuple[int, int]:
    """A pair whose result is said at once."""
    if kind == "multiply":
        return draw.weighted((((draw.between(0, 12), draw.between(0, 12)), 0.8), (_round_product(draw), 0.2)))
    if kind == "divide":
        return _quotient(draw)
    if draw.chance(0.05):
        unit = draw.pick((100, 1000))
        a, b = draw.between(1, 10) * unit, draw.between(1, 10) * unit
    elif draw.chance(0.2):
        a, b = draw.between(0, 12), draw.between(0, 12)
    elif draw.chance(0.1):  # 99 + 1, 30 - 30, 25 + 25, 60 + 7
        a = draw.between(1, 99)
        b = draw.pick((0, 1, 2, a, a, 10, 100 - a))
    else:
        a, b = draw.between(1, 99), draw.between(1, 99)
    if kind == "subtract":
        if draw.chance(0.2):
            a = 100
        elif draw.chance(0.8):
            a, b = max(a, b), min(a, b)
    elif draw.chance(0.03):
        a = 100
    return a, b


def _round_product(draw: Draw) -> tuple[int, int]:
    if draw.chance(0.3):
        a, b = draw.between(2, 100), 2
    elif draw.chance(0.5):
        a, b = draw.between(2, 99), draw.pick((10, 100, 1000))
    else:
        a, b = draw.between(1, 9) * draw.pick((10, 100)), draw.between(2, 9) * draw.pick((1, 10))
    return (a, b) if draw.chance(0.5) else (b, a)


def _quotient(draw: Draw) -> tuple[int, int]:
    b = draw.between(2, 12)
    at = draw.below(10)
    if at < 6:
        return b * draw.between(1, 12), b
    if at < 8:
        return draw.between(1, 100), draw.between(2, 10)
    if at == 8:
        return draw.between(1, 99) * 10, 10
    return 2 * draw.between(1, 100), 2


def _large(draw: Draw, kind: str) -> tuple[int, int]:
    """A pair that needs working."""
    while True:
        if kind == "multiply":
            long = draw.chance(0.3)
            a = draw.between(11, 99) if long else draw.between(11, draw.pick((99, 999, 999, 9999)))
            b = draw.between(11, 99) if long else draw.between(3, 9)
            a, b = (b, a) if draw.chance(0.3) else (a, b)
        elif kind == "divide":
            a, b = draw.between(101, draw.pick((999, 9999))), draw.between(2, 9)
        else:
            top = draw.weighted(((199, 0.1), (999, 0.55), (9999, 0.25), (99999, 0.1)))
            a = draw.between(max(101, top // 10), top)
            b = draw.between(1, top) if draw.chance(0.75) else draw.between(1, 99)
            swap = (
                a < b
                if kind == "subtract" and draw.chance(0.85)
                else draw.chance(0.2 if kind == "add" else 0.1)
            )
            a, b = (b, a) if swap else (a, b)
        if not is_direct(kind, a, b):
            return a, b


def number_check(kind: str, a: int, b: int) -> Check:
    if kind == "divide":
        return Check("contains", {"all": [equation(kind, a, b)], "task": kind, "digits": len(str(max(a, b)))})
    return Check("number", {"value": result(kind, a, b), "task": kind, "digits": len(str(max(a, b)))})


def _kind(draw: Draw) -> str:
    return draw.weighted((("add", 0.36), ("subtract", 0.32), ("multiply", 0.22), ("divide", 0.1)))


def _drawn(draw: Draw, kind: str, large: float) -> tuple[int, int]:
    size = _large if draw.chance(large) else _small
    return _held(draw, kind, lambda: size(draw, kind))


def small_pair(draw: Draw, kind: str) -> tuple[int, int]:
    """A pair of the split whose result is said without working."""
    return _held(draw, kind, lambda: _small(draw, kind))


def _framed(draw: Draw, kind: str, frames: str = "frames") -> tuple[str, ...]:
    """Wordings of one operation: an expression in a frame, or a sentence of the operation's own."""
    texts = sections("arithmetic")
    if frames == "frames" and draw.chance(0.3):
        return texts[kind]
    shown = draw.pick(texts[f"{kind} expressions"])
    frame = "{e}" if frames == "frames" and draw.chance(0.25) else draw.pick(texts[frames])
    return (frame.replace("{e}", shown),)


def _shown(draw: Draw, patterns: tuple[str, ...], a: int, b: int) -> dict[str, str]:
    """The numbers in digits, or in words where no sign stands beside them."""
    spoken = all(" {b}" in p and not re.search(r"[-+*×/÷:–=] *\{b\}", p) for p in patterns)
    if spoken and max(a, b) <= 100 and draw.chance(0.2):
        return {"a": number_word(a), "b": number_word(b)}
    return {"a": str(a), "b": str(b)}


def _sum(draw: Draw, large: float = 0.18, frames: str = "frames") -> list[Turn]:
    kind = _kind(draw)
    a, b = _drawn(draw, kind, large)
    asks = _framed(draw, kind, frames)
    asked = request(draw, kind, asks, _shown(draw, asks, a, b))
    return [user(asked), assistant(answer(kind, a, b), number_check(kind, a, b))]


def _sums(draw: Draw) -> list[Turn]:
    """Several sums in a row, mostly small ones: many sums for few words."""
    turns = _sum(draw, 0.1)
    for _ in range(draw.between(1, 5)):
        turns += _sum(draw, 0.05, "more")
    return turns


def _then(draw: Draw) -> list[Turn]:
    """A sum that goes on from the last result."""
    kind = draw.pick(("add", "subtract", "multiply"))
    a, b = small_pair(draw, kind)
    asks = _framed(draw, kind)
    asked = request(draw, kind, asks, _shown(draw, asks, a, b))
    turns = [user(asked), assistant(answer(kind, a, b), number_check(kind, a, b))]
    last = result(kind, a, b)
    for _ in range(draw.between(1, 2)):
        at = draw.below(3)
        kind = ("add", "subtract", "multiply")[at]
        c = draw.pick((2, 3, 10)) if kind == "multiply" else draw.between(1, 30)
        if last < c or last + c > 100 or (kind == "multiply" and not is_direct(kind, last, c)):
            break
        asked = request(draw, "then", (sections("arithmetic")["then"][at],), {"b": str(c)})
        turns += [user(asked), assistant(answer(kind, last, c), number_check(kind, last, c))]
        last = result(kind, last, c)
    return turns


def _sure(draw: Draw) -> list[Turn]:
    """The user doubts a right answer."""
    kind = draw.pick(("add", "subtract", "multiply"))
    a, b = small_pair(draw, kind)
    asks = _framed(draw, kind)
    asked = request(draw, kind, asks, _shown(draw, asks, a, b))
    wrong = str(result(kind, a, b) + draw.pick((-10, -2, -1, 1, 2, 3, 10)))
    texts = sections("arithmetic")
    doubt = ask(draw, texts["sure"], {"w": wrong})
    said = word(draw, texts["sure said"], e=equation(kind, a, b))
    check = number_check(kind, a, b)
    return [user(asked), assistant(answer(kind, a, b), check), user(doubt), assistant(said, check)]


def _only(draw: Draw) -> list[Turn]:
    """The result alone."""
    kind = draw.pick(("add", "subtract", "multiply"))
    a, b = small_pair(draw, kind)
    texts = sections("arithmetic")
    shown = draw.pick(texts[f"{kind} expressions"])
    frame = draw.pick(texts["frames"]).replace("{e}", shown)
    tail = draw.pick(texts["only"])
    pattern = f"{tail} {frame}" if draw.chance(0.3) else f"{frame} {tail}"
    asked = request(draw, f"only {kind}", (pattern,), _shown(draw, (pattern,), a, b))
    return answered(asked, str(result(kind, a, b)), f"number only, {kind}")


def _word_problem(draw: Draw) -> list[Turn]:
    kind = _kind(draw)
    asks, said = draw.pick(pairs("word_problems", kind))

    def make() -> tuple[int, int]:
        while True:
            a, b = (_large if draw.chance(0.12) else _small)(draw, kind)
            if min(a, b) > 1 and result(kind, a, b) > 1 and not (kind == "divide" and a % b):
                return a, b

    a, b = _held(draw, kind, make)
    slots = {
        "n": draw.pick(NAMES), "m": draw.pick(NAMES), "i": draw.pick(words("word_problems", "items")),
        "f": draw.pick(words("word_problems", "foods")), "a": str(a), "b": str(b),
    }  # fmt: skip
    asked = request(draw, "word problem", (asks,), slots)
    end = word(draw, said, r=str(result(kind, a, b)), **slots)
    steps = answer(kind, a, b)
    said = f"{steps}\n{end}" if "\n" in steps else f"{steps} {end}"
    value = str(result(kind, a, b))
    return [
        user(asked),
        assistant(said, Check("contains", {"all": [f"= {value}", end], "task": "word problem"})),
    ]


def _two_steps(draw: Draw) -> list[Turn]:
    """A word problem whose result takes two sums."""
    ask_form, said, signs = draw.pick(pairs("word_problems", "steps"))
    kinds = ["add" if sign == "+" else "subtract" for sign in signs.split()]
    while True:
        a, b, c = draw.between(10, 60), draw.between(2, 30), draw.between(2, 20)
        first = result(kinds[0], a, b)
        value = result(kinds[1], first, c)
        if min(first, value) > 1:
            break
    slots = {
        "n": draw.pick(NAMES), "m": draw.pick(NAMES), "i": draw.pick(words("word_problems", "items")),
        "f": draw.pick(words("word_problems", "foods")), "a": str(a), "b": str(b), "c": str(c),
    }  # fmt: skip
    asked = request(draw, "two steps", (ask_form,), slots)
    end = word(draw, said, r=str(value), **slots)
    steps = f"{equation(kinds[0], a, b)}, {equation(kinds[1], first, c)}. {end}"
    check = Check("contains", {"all": [f"= {value}", end], "task": "word problem of two steps"})
    return [user(asked), assistant(steps, check)]


def _chain(draw: Draw) -> list[Turn]:
    """Three numbers: one step at a time."""
    a, b, c = draw.between(2, 12), draw.between(2, 12), draw.between(2, 12)
    times = draw.pick(("*", "×", "x"))
    form = draw.below(5)
    if form == 0:
        a, b, c = draw.between(1, 50), draw.between(1, 40), draw.between(1, 10)
        shown, said = f"{a} + {b} + {c}", f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}"
    elif form == 1:
        shown, said = f"{a} + {b} {times} {c}", f"{a} + {b} × {c} = {a} + {b * c} = {a + b * c}"
    elif form == 2:
        shown = f"({a} + {b}) {times} 3"
        said = f"({a} + {b}) × 3 = {a + b} × 3 = {3 * (a + b)}"
    elif form == 3:
        shown, said = f"{a} {times} {b} - {c}", f"{a} × {b} - {c} = {a * b} - {c} = {a * b - c}"
    else:
        a = draw.between(40, 99)
        shown, said = f"{a} - {b} - {c}", f"{a} - {b} - {c} = {a - b} - {c} = {a - b - c}"
    shown = shown if draw.chance(0.6) else shown.replace(" ", "")
    asked = request(draw, "three numbers", sections("arithmetic")["three expressions"], {"e": shown})
    return answered(asked, said + ".", "three numbers")


def _sum_of_list(draw: Draw) -> list[Turn]:
    numbers = [draw.between(1, 20) for _ in range(draw.between(3, 4))]
    total, steps = numbers[0], []
    for n in numbers[1:]:
        steps.append(f"{total} + {n} = {total + n}")
        total += n
    shown = (
        ", ".join(map(str, numbers))
        if draw.chance(0.5)
        else f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    )
    asked = request(draw, "sum of a list", sections("arithmetic")["sum of list"], {"l": shown})
    return answered(asked, ", ".join(steps) + ".", "sum of a list")


def _one_number(draw: Draw) -> list[Turn]:
    """Doubles, halves, squares, roots, rounding, averages."""
    slots: dict[str, str] = {}
    topic = draw.pick(("double", "half", "square", "root", "round", "average", "power", "factorial", "part"))
    a, b = draw.between(1, 100), 0
    if topic == "double":
        said = f"2 × {a} = {2 * a}."
    elif topic == "half":
        said = f"Half of {a} is {a // 2}{'.5' if a % 2 else ''}."
    elif topic == "square":
        a = draw.pick((*range(1, 13), 15, 20, 25, 30, 50, 100))
        said = f"{a} × {a} = {a * a}."
    elif topic == "root":
        root = draw.pick((*range(1, 13), 20, 100))
        a = root * root
        said = f"The square root of {a} is {root}, because {root} × {root} = {a}."
    elif topic == "power":
        a = draw.pick((2, 2, 3, 5, 10, 10))
        b = draw.between(2, {2: 10, 3: 4, 5: 3, 10: 6}[a])
        said = f"{a} to the power of {b} is {a**b}."
    elif topic == "factorial":
        a = draw.between(1, 7)
        steps = " × ".join(str(n) for n in range(1, a + 1))
        said = f"{a}! = {steps} = {math.factorial(a)}." if a > 1 else "1! = 1."
    elif topic == "part":
        part, by = draw.pick((("third", 3), ("quarter", 4), ("fifth", 5), ("tenth", 10)))
        a = by * draw.between(1, 20)
        slots["p"] = part
        said = f"A {part} of {a} is {a // by}."
    elif topic == "round":
        a = draw.between(1, 999)
        said = f"{a} rounded to the nearest ten is {(a + 5) // 10 * 10}."
    else:
        b = a % 40 + 2 * draw.between(0, 10)
        a = a % 40
        said = f"The average of {a} and {b} is {(a + b) // 2}, because {a} + {b} = {a + b}."
    asked = request(draw, topic, sections("arithmetic")[topic], {"a": str(a), "b": str(b)}, **slots)
    return answered(asked, said, topic)


def _percent(draw: Draw) -> list[Turn]:
    while True:
        p = draw.pick(_PERCENTS)
        n = draw.pick((draw.between(1, 20) * 10, draw.between(1, 10) * 100, 100, 200))
        if p * n % 100 == 0:
            break
    asked = request(draw, "percent", sections("arithmetic")["percent"], {"a": str(n), "p": str(p)})
    return answered(asked, f"{p}% of {n} is {p * n // 100}.", "percent")


def _discount(draw: Draw) -> list[Turn]:
    n = draw.between(1, 10) * 10
    p = draw.pick((10, 10, 20, 20, 30, 40, 50, 50, 60, 70, 80, 90))
    less = p * n // 100
    asked = request(draw, "percent off", sections("arithmetic")["off"], {"a": str(n), "p": str(p)})
    return answered(asked, f"{p}% of {n} is {less}, and {n} - {less} = {n - less}.", "percent off")


def judged(right: str, said: str) -> str:
    """The equation first, then what that makes of the result somebody said: nothing is decided before it is computed."""
    value = right.rpartition(" ")[2]
    return f"{right}, so {'that is right' if said == value else f'{said} is wrong'}."


def _claim(draw: Draw) -> list[Turn]:
    """The user says an equation; is it right?"""
    kind = draw.pick(("add", "subtract", "multiply"))
    a, b = small_pair(draw, kind)
    value = result(kind, a, b)
    wrong = value if draw.chance(0.5) else value + draw.pick((-10, -2, -1, 1, 2, 10))
    sign = draw.pick((SIGNS[kind], {"multiply": "times", "add": "plus", "subtract": "minus"}[kind]))
    shown = f"{a} {sign} {b} {draw.pick(('=', '=', 'is'))} {wrong}"
    asked = request(draw, "claim", sections("arithmetic")["claim"], {"c": shown})
    return answered(asked, judged(equation(kind, a, b), str(wrong)), "is it right")


def _compare_decimals(draw: Draw) -> list[Turn]:
    """9.9 and 9.11: the first digit after the point decides."""
    whole, tenths = draw.between(0, 20), draw.sample(range(10), 2)
    shown = [f"{whole}.{t}{draw.pick(('', str(draw.between(1, 9))))}" for t in tenths]
    high, low = shown if tenths[0] > tenths[1] else shown[::-1]
    a, b = draw.shuffled([high, low])
    larger = draw.chance(0.6)
    w = draw.pick(("larger", "bigger", "greater") if larger else ("smaller", "lower"))
    asked = request(draw, "compare", sections("arithmetic")["compare"], {"a": a, "b": b}, w=w)
    said = f"{high} is larger than {low}." if larger else f"{low} is smaller than {high}."
    return answered(asked, said, "compare decimals")


def _compare(draw: Draw) -> list[Turn]:
    if draw.chance(0.15):
        return _compare_decimals(draw)
    a, b = operands(draw, "compare", draw.weighted(((1, 0.25), (2, 0.55), (3, 0.15), (4, 0.05))))
    larger = draw.chance(0.5)
    w = draw.pick(("larger", "bigger", "greater", "higher") if larger else ("smaller", "lower"))
    asks = sections("arithmetic")["is larger" if draw.chance(0.35) else "compare"]
    asked = request(draw, "compare", asks, {"a": str(a), "b": str(b)}, w=w)
    w = "larger" if larger else "smaller"
    if a == b:
        return answered(asked, f"They are equal: both are {a}.", "compare")
    first = max(a, b) if larger else min(a, b)
    said = f"{first} is {w} than {a + b - first}."
    if asks is sections("arithmetic")["is larger"]:
        said = f"{'Yes' if first == a else 'No'}, {said}"
    return answered(asked, said, "compare")


def _parity(draw: Draw) -> list[Turn]:
    if draw.chance(0.4):
        n = draw.between(2, 60)
        low = next((d for d in range(2, n) if n % d == 0), 0)
        asked = request(draw, "prime", sections("arithmetic")["prime"], {"a": str(n)})
        said = f"No, {n} = {low} × {n // low}." if low else f"Yes, {n} is a prime number."
        return answered(asked, said, "prime")
    n = draw.between(0, draw.pick((20, 99, 999)))
    asked = request(draw, "parity", sections("arithmetic")["parity"], {"a": str(n)})
    return answered(asked, f"{n} is {'odd' if n % 2 else 'even'}.", "even or odd")


def _neighbour(draw: Draw) -> list[Turn]:
    """The number after or before another one."""
    a = draw.between(0, 99) if draw.chance(0.9) else draw.between(100, 999)
    after = draw.chance(0.6) or a == 0
    heading = "after" if after else "before"
    asked = request(draw, f"{heading} number", sections("arithmetic")[f"{heading} number"], {"a": str(a)})
    return answered(asked, f"{a + 1 if after else a - 1} comes {heading} {a}.", "neighbour of a number")


def _next(draw: Draw) -> list[Turn]:
    """The next number of a sequence, and by how much it goes."""
    step = draw.pick((1, 2, 2, 3, 4, 5, 5, 10, 10, 100, -1, -2, -5, -10))
    count = draw.between(3, 5)
    start = draw.between(0, 30) if step > 0 else draw.between(-step * (count + 1), 60 - 4 * step)
    start = start // step * step if draw.chance(0.5) else start
    numbers = [start + i * step for i in range(count + 1)]
    if draw.chance(0.12):
        start = draw.between(1, 5)
        numbers = [start * 2**i for i in range(count + 1)]
        why = f"Each number is twice the one before: 2 × {numbers[-2]}"
    else:
        does, sign = ("adds", "+") if step > 0 else ("takes away", "-")
        why = f"Each step {does} {abs(step)}: {numbers[-2]} {sign} {abs(step)}"
    shown = draw.pick((", ", ", ", " ", ",")).join(map(str, numbers[:-1]))
    asked = request(draw, "next number", sections("arithmetic")["next"], {"l": shown})
    return answered(asked, f"{why} = {numbers[-1]}.", "next number")


def _equation(draw: Draw) -> list[Turn]:
    x, b = draw.between(1, 20), draw.between(1, 20)
    form = draw.below(4)
    if form == 0:
        shown, said = f"x + {b} = {x + b}", f"x = {x + b} - {b} = {x}"
    elif form == 1:
        shown, said = f"x - {b} = {x}", f"x = {x} + {b} = {x + b}"
    elif form == 2:
        x, b = draw.between(1, 12), draw.between(2, 12)
        shown, said = f"{b}x = {x * b}", f"x = {x * b} / {b} = {x}"
    else:
        shown, said = f"{b} + x = {x + b}", f"x = {x + b} - {b} = {x}"
    shown = shown if draw.chance(0.7) else shown.replace(" ", "")
    asked = request(draw, "equation", sections("arithmetic")["equation"], {"e": shown})
    return answered(asked, said + ".", "equation")


def _units(draw: Draw) -> list[Turn]:
    one, many, factor = draw.pick(pairs("arithmetic", "unit table"))
    n = draw.pick((1, 1, 2, 2, 3, 4, 5, 10, draw.between(1, 12)))
    name = one if n == 1 else {"foot": "feet", "century": "centuries"}.get(one, f"{one}s")
    article = ("an" if one == "hour" else "a") if n == 1 and draw.chance(0.7) else str(n)
    asked = request(draw, "units", sections("arithmetic")["units"], {"n": article, "o": name, "u": many})
    said = f"{n} {name} {'is' if n == 1 else 'are'} {int(factor) * n} {many}"
    working = f"{n} × {factor} = {int(factor) * n}. " if n > 1 else ""
    return answered(asked, f"{working}{said[0].upper()}{said[1:]}.", "units")


def _beyond(draw: Draw) -> list[Turn]:
    """What is too hard, and what can't be done at all."""
    texts = sections("arithmetic")
    if draw.chance(0.15):
        asked = request(draw, "pi", texts["pi"])
        return [
            user(asked),
            assistant(draw.pick(texts["pi said"]), Check("contains", {"all": ["3.14"], "task": "pi"})),
        ]
    if draw.chance(0.2):
        a = str(draw.between(0, 100))
        asked = request(draw, "by zero", texts["zero"], {"a": a})
        check = Check("contains", {"all": ["no answer"], "task": "by zero"})
        return [user(asked), assistant(word(draw, texts["zero said"], a=a), check)]
    slots = {
        "x": str(draw.between(10**6, 10 ** draw.between(7, 9))), "y": str(draw.between(10**5, 10**8)),
        "s": str(draw.between(13, 99)), "t": str(draw.between(2, 9)), "u": str(draw.between(1, 9)),
        "v": str(draw.between(101, 99999)),
    }  # fmt: skip
    asked = request(draw, "too hard", texts["beyond"], slots)
    check = Check("contains", {"all": ["can't|too hard|too small|beyond"], "task": "says it is too hard"})
    return [user(asked), assistant(draw.pick(texts["beyond said"]), check)]


_KINDS: tuple[tuple[Callable[[Draw], list[Turn]], float], ...] = (
    (_sum, 0.34), (_sums, 0.16), (_word_problem, 0.12), (_two_steps, 0.06), (_only, 0.04), (_then, 0.05), (_sure, 0.02), (_chain, 0.02),
    (_sum_of_list, 0.02), (_one_number, 0.02), (_percent, 0.01), (_neighbour, 0.03),
    (_discount, 0.002), (_claim, 0.02), (_compare, 0.07), (_parity, 0.01),
    (_next, 0.01), (_equation, 0.004), (_units, 0.004), (_beyond, 0.03),
)  # fmt: skip


def make(draw: Draw) -> Conversation:
    """One question about numbers, or several in a row."""
    return Conversation("arithmetic", draw.weighted(_KINDS)(draw))
