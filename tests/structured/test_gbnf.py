"""GBNF and EBNF: every construct fits exactly what it says, and unusable grammars are refused with line or rule."""

from __future__ import annotations

import pytest

from helpers.byte_matcher import fits, source_of
from quire.structured.ask import GrammarError

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ['{"a": [1, -2.5e1, "x\\n", {}],"b":true}', "{}\n\t\t"], ['{"a" 1}', '{"a": 01}', "[1]", '{"a":1,}']),
        ('root ::= "ab" "c" | "a" "bd"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= [a-z]* "x" "(" root ")" | "x"', ["x", "abx(x)", "x(xx(x))"], ["ab", "x()"]),
        ('root ::= t ("+" t)*\nt ::= [0-9]+ ws | "(" root ")" ws\nws ::= [ \\n]*', ["1", "(1+2 )\n+3"], ["1+", "()"]),
        # What ends a term is also white space: no terminal of a lexer may contain both.
        (
            'root ::= (e "=" ws t "\\n")+\ne ::= t ([-+] ws t)*\nt ::= [a-z]+ ws | "(" ws e ")" ws\nws ::= [ \\t\\n]*',
            ["a=b\n", "(a - b) =c \nd= e\n\n"], ["a=b", "a=\n"],
        ),
        ('root ::= ws "x" ws\nws ::= | " " ws', ["x", "  x   "], [" "]),
        ('root ::= ("a" | # one\n  "b" # another\n){2}\n', ["ab", "bb"], ["a", "abb"]),
        ('root ::= "a"{2,}  "b"{0,1} "c"{1} "d"*"e"? "f"+', ["aacf", "aaabcddeff"], ["acf", "aabbcf", "aac"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"\\" [\]\-a-c] [^\n]', ['Aé😀\t"\\]x', 'Aé😀\t"\\-é'], ["A"]),
        ("root ::= [a-] [-b] .", ["a-\n", "-bé"], ["bb"]),
        ('root ::= a.b\na.b ::= "x"', ["x"], ["axb"]),
        ('root ::= a.b\na ::= "x"\nb ::= "y"', ["x.y", "xéy"], ["xy"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "aab" | x "a"{1,1} "b" | "ac"\nx ::= "a"', ["aab", "ac"], ["ab"]),  # llguidance fails on it as it is
        ('root ::= a-b | c_d\na-b ::=\n  "x"\n  "y"\nc_d ::= "z"', ["xy", "z"], ["x"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(", ")"]),
        ('root ::= ("a" root "b")?', ["", "aabb"], ["aab"]),
        ('root ::= x root | "."\nx ::= "(" x ")" | "i"', [".", "i(i)."], ["(i."]),
    ],
)  # fmt: skip
def test_texts_fit_as_the_rules_say(grammar: str, right: list[str], wrong: list[str]) -> None:
    source = source_of(grammar=grammar)
    assert [text for text in right if not fits(source, text)] == []
    assert [text for text in wrong if fits(source, text)] == []


def test_large_parts_are_terminals() -> None:
    """A mask walks through terminals faster than through rules."""
    assert source_of(grammar=JSON).count("\nT") < 16
    assert source_of(grammar='root ::= a+\na ::= b | "x" b\nb ::= [0-9]{2}').startswith("start: T")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= root "a" | "b"', r"rule root is left-recursive \(root -> root\)"),
        ('root ::= a\na ::= b? c\nb ::= "x"\nc ::= a "y" | "z"', r"left-recursive \(a -> c -> a\)"),
        ("root ::=", 'line 1: rule root is empty; write "" for the empty string'),
        ('root ::= "a"\n\nx ::=\ny ::= "b"', "line 3: rule x is empty"),
        ('root ::= "a" x', "rule root refers to x, which is not defined"),
        ('x ::= "a"', "there is no rule root"),
        ('root ::= "a" root', "rule root never ends"),
        ('root ::= "a" | b\nb ::= "(" b ")"', "rule b never ends"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ('root ::= "a', "line 1: the string is not closed"),
        ("root ::= [a", r"line 1: '\[' is not closed"),
        ("root ::= []", "has no characters"),
        (r"root ::= [^\x00-\U0010FFFF]", "matches no character"),
        ("root ::= [z-a]", "the range z-a is out of order"),
        ('root ::= ("a"', r"line 1, rule root: '\(' is not closed"),
        ('root ::= "a")', r"unexpected '\)'"),
        ("root ::= *", r"nothing to repeat before '\*'"),
        ('root ::= "a"{1,1000000000}', "over the limit of 65536"),
        ('root ::= ("a"{1000}){1000}', "allows 1000000 copies of one item"),
        ('root ::= "a"{5,2}', "a maximum below its minimum"),
        ('root ::= "a"{x}', "is not a repetition"),
        (r'root ::= "\q"', r"the escape \\q is not supported"),
        (r'root ::= "\x4"', "needs 2 hexadecimal digits"),
        (r'root ::= "\ud800"', "is not a character"),
        ("root ::= <think>", "a token \\(<think>\\) is not supported"),
        ('root ::= "a" (= "b")', "look-ahead"),
        ("root ::= TagDispatch(x)", "the macro TagDispatch"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "nested more than 128 deep"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(200)) + 'r200 ::= "a"', "than 128 references"),
        ("root ::= r0\n" + "".join(f'r{i} ::= "a"\n' for i in range(9000)), "9001 rules exceed the limit of 8192"),
        ('root ::= "a" ; "b"', "unexpected ';'"),
        ("::= a", "a rule must begin with its name"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        source_of(grammar=grammar, syntax="gbnf")
    assert raised.value.field == "grammar"
