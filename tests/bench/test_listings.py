"""The worked examples print what the documents print, where those are right; and docs/metrics.md holds them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from quire.bench.goodput import PRESETS
from quire.bench.lesson.listings import LISTINGS as OFFERED
from quire.bench.listings import LISTINGS, Listing
from quire.bench.request_metrics import DEFINITIONS
from quire.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

# What the pages print, word for word; five figures of theirs are wrong and stand there as they should be.
PRINTED = {one.name: one.output for one in OFFERED}


@pytest.mark.parametrize("listing", LISTINGS, ids=lambda one: one.name)
def test_an_example_prints_the_right_figures(listing: Listing) -> None:
    assert listing.output() == PRINTED[listing.name]
    assert listing.about


def test_every_example_is_checked() -> None:
    assert [one.name for one in LISTINGS] == list(PRINTED)[: len(LISTINGS)]


def test_the_page_shows_the_output_of_its_code() -> None:
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == len(LISTINGS) + 1  # the first are the imports
    names: dict[str, object] = {}
    for code, printed in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        assert out.getvalue() == printed


def test_the_page_holds_every_example_definition_and_preset() -> None:
    text = DOCS.read_text()
    for one in LISTINGS:
        assert f"### {one.name}\n" in text
        assert one.source() in text
        assert one.note in text
    for name, words in DEFINITIONS.items():
        assert f"| {name} | {words} |" in text
    for name, (slo, why) in PRESETS.items():
        assert f"| {name} | `{slo}` | {why} |" in text


def test_explained_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "explain-metrics"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in DEFINITIONS.values())
    assert "decode TPS: 27.8" in text
    assert main(["bench", "explain-metrics", "tpot-by-hand"]) == 0
    assert "40.8 ms/token" in capsys.readouterr().out
    assert main(["bench", "explain-metrics", "tpott"]) == 2
    assert "did you mean tpot" in capsys.readouterr().err
