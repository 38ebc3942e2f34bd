"""Markdown that is shown while it comes: the same whatever the pieces, and nothing that controls the terminal."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.streamed_markdown import StreamedMarkdown

TEXT = """# A heading

Some **bold words** and *emphasis*, `code with **stars**`, 2 * 3 and a_b.
- an item that is long enough to be wrapped somewhere
- another

1. first

```python
def f():  # no heading
    return "**"
```

| a | b |
|---|---|
| 1 | 2 |

The end"""


def shown(pieces: list[str], width: int = 30) -> str:
    out: list[str] = []
    streamed = StreamedMarkdown(out.append, width)
    for piece in pieces:
        streamed.feed(piece)
    streamed.end()
    return "".join(out)


def bare(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_marks_become_style() -> None:
    text = shown([TEXT])
    for part in (
        "\x1b[1mheading\x1b[0m",
        "\x1b[1mbold\x1b[0m",
        "\x1b[1mwords\x1b[0m",
        "\x1b[3memphasis\x1b[0m,",
    ):
        assert part in text
    assert "\x1b[36m**stars**\x1b[0m" in text
    assert bare(text).splitlines() == [
        "A heading", "", "Some bold words and emphasis,", "code with **stars**, 2 * 3 and", "a_b.",
        "- an item that is long enough", "  to be wrapped somewhere", "- another", "", "1. first", "",
        "    def f():  # no heading", '        return "**"', "", "a  b", "-  -", "1  2", "", "The end",
    ]  # fmt: skip


@settings(max_examples=50)
@given(st.lists(st.integers(1, len(TEXT)), max_size=20))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(TEXT)]
    assert shown([TEXT[i:j] for i, j in itertools.pairwise(at)]) == shown([TEXT])


def test_words_are_shown_as_soon_as_they_end() -> None:
    out: list[str] = []
    streamed = StreamedMarkdown(out.append, 80)
    streamed.feed("One tw")
    assert "".join(out) == "One"
    streamed.feed("o three")
    assert "".join(out) == "One two"


@given(st.text(alphabet=st.sampled_from("a *`#|-\n\x1b\x07[]2J0m\u202e")))
def test_no_text_controls_the_terminal(text: str) -> None:
    rest = bare(shown([text]))
    assert not set(rest) & set("\x1b\x07\u202e")


def test_styles_end_with_the_text() -> None:
    assert shown(["**never closed"]).rstrip("\n").endswith("\x1b[0m")
    assert shown(["**never\nclosed"]).count("\x1b[1m") == 1
