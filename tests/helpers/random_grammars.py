"""Random grammars in GBNF, and a definition of which texts fit one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from helpers.byte_matcher import fits
from quire.structured.ask import GrammarError
from quire.structured.character_rules import Alternatives, Node, OneOf, RuleRef, Text, Then, Times
from quire.structured.gbnf import parse_gbnf
from quire.structured.lark_text import write_lark

TEXTS = ["".join(word) for size in range(6) for word in itertools.product("ab", repeat=size)]


def random_gbnf(seed: int) -> str:
    """Up to four rules over the characters a and b."""
    draw = random.Random(seed)
    names = ["root", "x", "y", "z"][: draw.randint(1, 4)]

    def node(depth: int) -> str:
        kind = draw.random()
        if depth <= 0 or kind < 0.35:
            return draw.choice(
                [
                    '"a"',
                    '"b"',
                    '"ab"',
                    '"ba"',
                    '"aab"',
                    "[ab]",
                    "[a]",
                    ".",
                    '""',
                    draw.choice(names),
                    draw.choice(names),
                ]
            )
        if kind < 0.6:
            return " ".join(node(depth - 1) for _ in range(draw.randint(2, 3)))
        if kind < 0.8:
            return "(" + " | ".join(node(depth - 1) for _ in range(draw.randint(2, 3))) + ")"
        return "(" + node(depth - 1) + ")" + draw.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}"])

    bodies = [[node(draw.randint(1, 3)) for _ in range(draw.randint(1, 2))] for _ in names]
    if draw.random() < 0.8:  # otherwise most have no recursion, and are one terminal
        around = draw.choice(names)
        bodies[0].append(
            draw.choice([f'"a" {around} "b"', f"{node(1)} root [ab]", f'"b" {around} {node(1)}'])
        )
    return "\n".join(f"{name} ::= {' | '.join(body)}" for name, body in zip(names, bodies, strict=True))


def reference_texts(rules: Mapping[str, Node], start: str) -> set[str]:
    """Those of TEXTS that fit, by the meaning of each construct alone."""
    return {text for text in TEXTS if _fits(rules, start, text)}


def _fits(rules: Mapping[str, Node], start: str, text: str) -> bool:
    known: dict[tuple[str, int], frozenset[int]] = {}

    def ends(node: Node, at: int) -> frozenset[int]:
        if isinstance(node, RuleRef):
            key = node.name, at
            if key not in known:
                known[key] = ends(rules[node.name], at)
            return known[key]
        if isinstance(node, Text):
            return frozenset({at + len(node.text)} if text.startswith(node.text, at) else ())
        if isinstance(node, OneOf):
            inside = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
            return frozenset({at + 1} if inside else ())
        if isinstance(node, Alternatives):
            return frozenset().union(*(ends(part, at) for part in node.parts))
        if isinstance(node, Then):
            places = frozenset({at})
            for part in node.parts:
                places = frozenset().union(*(ends(part, place) for place in places))
            return places
        assert isinstance(node, Times)
        return repeated(node, at)

    def repeated(node: Times, at: int) -> frozenset[int]:
        places, found, seen = frozenset({at}), set[int](), set[tuple[int, int]]()
        count = 0
        most = node.high if node.high is not None else node.low + len(text) + 1
        while places and count <= most:
            if count >= node.low:
                found |= places
            new = frozenset().union(*(ends(node.part, place) for place in places))
            count += 1
            places = frozenset(place for place in new if count <= node.low or (place, count) not in seen)
            seen |= {(place, count) for place in places}
        return frozenset(found)

    return len(text) in ends(RuleRef(start), 0)


def check_grammar(seed: int) -> bool:
    """Compare a random grammar with the definition; False for one that is refused."""
    text = random_gbnf(seed)
    try:
        rules = parse_gbnf(text)
    except GrammarError:
        return False
    source = write_lark(rules, "root")
    found = {word for word in TEXTS if fits(source, word)}
    expected = reference_texts(rules, "root")
    assert found == expected, (text, source, sorted(found ^ expected))
    return True
