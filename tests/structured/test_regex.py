"""Regular expressions fit what Python's re.fullmatch fits, and what is not regular is refused by name."""

from __future__ import annotations

import itertools
import re

import pytest

from helpers.byte_matcher import fits, source_of
from quire.structured.ask import GrammarError

SHARED = [
    "a|b*c", "(a|b)*abb", "a{2,3}b?", "[^a]{1,2}", "(?:ab)+c*", "a+?b", "(?i)aB", "a(?i:b)c", "(?P<x>a|)b", "^ab$|c",
    r"[\]a-b^-]+", r"\x61[\w]", r"\.\*\\", ".b.", "(?s:.)a", r"[\d\-x]*", "", "()", "a{0}b", "(a{1,2}){2}", r"\u0061",
    "a{", "x{1", r"[a\]]b", "((a|ab)(c|bcd))d*",
]  # fmt: skip
ALPHABET = "abcAB.\n"


@pytest.mark.parametrize("pattern", SHARED)
def test_the_same_texts_as_in_python(pattern: str) -> None:
    source, expected = source_of(regex=pattern), re.compile(pattern)
    texts = ["".join(text) for size in range(4) for text in itertools.product(ALPHABET, repeat=size)]
    texts += [".*\\", "]-^", "abcabc", "aaab", "abbb", "abcdd", "x1-x", "a_", "a{", "x{1"]
    found = [text for text in texts if fits(source, text)]
    assert found == [text for text in texts if expected.fullmatch(text)]


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"\p{Lu}\p{Ll}+", ["Élan"], ["élan", "E1"]),
        (r"[\P{L}x]+", ["1x,"], ["y"]),
        ("\\u{1F600}\\uD83D\\uDE00", ["😀😀"], ["😀"]),
        (r"\cJ\0", ["\n\0"], ["J0"]),
        ("(?i)straße|ÉTÉ[a-é]", ["STRAßE", "étéÉ", "ÉTéZ"], ["STRASSE"]),
        (r"[^\S]+", [" \t"], ["a"]),
        (r"a/b//c#d", ["a/b//c#d"], []),
        ("(a+)+b", ["aaaab"], ["aaaa"]),
    ],
)
def test_what_python_writes_differently(pattern: str, right: list[str], wrong: list[str]) -> None:
    source = source_of(regex=pattern)
    assert [text for text in right if not fits(source, text)] == []
    assert [text for text in wrong if fits(source, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("foo**", "character 4: a repetition of a repetition"),
        ("*a", "nothing to repeat before '\\*'"),
        (r"(a)\1", r"character 3: a back-reference \\1"),
        (r"(?P<a>x)\k<a>", "back-reference"),
        ("(?P<a>x)(?P=a)", "a reference to a group"),
        ("a(?=b)", "look-ahead"),
        ("a(?!b)", "negative look-ahead"),
        ("(?<=a)b", "look-behind"),
        ("(?<!a)b", "negative look-behind"),
        (r"\bword", r"the word boundary \\b"),
        ("a^b", r"\^ inside the expression"),
        ("(a$)", r"\$ inside the expression"),
        ("(?>a)", "an atomic group"),
        ("a++", "a possessive repetition"),
        ("(?(1)a|b)", "a condition"),
        ("(?x) a", "the flag x"),
        ("[[:alpha:]]", "a POSIX class"),
        (r"\q", r"the escape \\q"),
        (r"\012", "an octal escape"),
        (r"\xZ1", "needs 2 hexadecimal digits"),
        (r"\uD800", "is not a character"),
        ("(a", r"character 0: '\(' is not closed"),
        ("a)", r"without a matching '\('"),
        ("[a", r"'\[' is not closed"),
        ("[]", "an empty class"),
        (r"a|[^\s\S]", "character 2: the class matches no character"),
        ("[z-a]", "the range z-a is out of order"),
        ("a{3,2}", "a maximum below its minimum"),
        ("a{1,1000000000}", "over the limit of 65536"),
        ("(a{1,1000}){1,1000}", "allows 1000000 copies of one item"),
        ("(" * 200 + ")" * 200, "nested more than 128 deep"),
        ("\\", "a backslash with nothing after it"),
        (r"\p{Nonsense}", "Unicode property not found"),
    ],
)
def test_what_is_refused_is_named(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        source_of(regex=pattern)
    assert raised.value.field == "regex"


@pytest.mark.parametrize(
    "choices", [["a"], ["a", "ab", ""], ['"\n\\', "\x7f\0", "é😀", "a|b", "//", "a"], ["x" * 3000, "x"]]
)
def test_choices_are_exact(choices: list[str]) -> None:
    source = source_of(choice=choices)
    assert [text for text in choices if not fits(source, text)] == []
    assert not any(fits(source, text) for text in ("b", "abc", "é", "\n", "x" * 2999) if text not in choices)
