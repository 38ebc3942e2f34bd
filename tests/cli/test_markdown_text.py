"""Markdown as values, and as lines of a terminal."""

from __future__ import annotations

from quire.cli.markdown_text import MarkdownText
from quire.util.markdown import blocks, inline, plain


def shown(text: str, width: int = 40, *, styled: bool = False) -> list[str]:
    return MarkdownText(width, styled=styled).lines(blocks(text))


def test_parts_of_a_line() -> None:
    assert [node["kind"] for node in inline("a **b *c*** `d*e*` [f](g) 2 * 3 * 4 x*y*z")] == [
        "text", "strong", "text", "code", "text", "link", "text",
    ]  # fmt: skip
    assert plain(inline("a **b** `c` [d](e)")) == "a b c d"
    assert plain(inline("{{no number}} here")) == "{{no number}} here"
    resolved = inline("`{{a}}` is {{b | c}}", lambda reference: {"kind": "number", "text": reference})
    assert [node["kind"] for node in resolved] == ["code", "text", "number"]


def test_blocks_of_a_text() -> None:
    text = "# One\ntwo\nthree\n- four\n  five\n- six\n\n```py\n# no heading\n- no item\n```\n1. seven\n\n"
    text += "|a|b|\n|-|-|\n|`c|d`|\n"
    kinds = [node["kind"] for node in blocks(text)]
    assert kinds == ["heading", "paragraph", "list", "fence", "list", "table"]
    assert shown(text) == [
        "One", "", "two three", "", "- four five", "- six", "", "    # no heading", "    - no item", "", "1. seven", "",
        "a    b", "---  -", "c|d",
    ]  # fmt: skip
    assert blocks("```\nnever closed") == [{"kind": "fence", "language": "", "text": "never closed"}]
    assert shown("a | b") == ["a | b"]  # no table


def test_lines_are_wrapped_whatever_their_style() -> None:
    text = "**a bold sentence** that goes on and on until it has to be wrapped"
    assert shown(text, 20) == ["a bold sentence that", "goes on and on until", "it has to be wrapped"]
    styled = shown(text, 20, styled=True)
    assert [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in styled] == shown(text, 20)
    assert all(line.count("\x1b[1m") == line.count("\x1b[0m") for line in styled)


def test_a_wide_table_becomes_lines() -> None:
    assert shown("|name|about|\n|-|-|\n|first|much too long for it|", 20) == [
        "- name: first", "  about: much too", "    long for it",
    ]  # fmt: skip


def test_no_text_controls_the_terminal() -> None:
    for text in ("\x1b[2Jx", "`\x1b]0;t\x07`", "```\n\x1b[31m\n```", "[a](\x1b[0m:)", "|\x1b[5m|b|\n|-|-|"):
        assert "\x1b" not in "".join(shown(text))
        assert "\x1b[2J" not in "".join(shown(text, styled=True))
