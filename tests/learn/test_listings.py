"""Each listing prints what it must, alone and by the command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.cli.main import main
from quire.cli.serve import simulated
from quire.learn.lesson_listings import listing, listings
from quire.learn.offered import offer

offer(simulated)


@pytest.mark.parametrize("name", listings())
def test_a_listing_prints_what_it_must(name: str) -> None:
    one = listing(name)
    assert one.differs() == ""
    assert one.about
    assert one.source


def test_the_command_runs_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "run", "dynamic-token-budgeting"]) == 0
    assert capsys.readouterr().out == "max context per user: 8,544 tokens\n"
    assert main(["learn", "run", "dynamic-token-budgeting", "--source"]) == 0
    assert "max_context(320" in capsys.readouterr().out
    assert main(["learn", "check", "dynamic-token-budgeting", "metrics-of-one-request"]) == 0
    assert capsys.readouterr().out.count("as it must") == 2
    assert main(["learn", "run", "dynamic-token-budgetin"]) == 2
    assert "did you mean dynamic-token-budgeting" in capsys.readouterr().err


def test_another_output_is_noticed() -> None:
    one = listing("dynamic-token-budgeting")
    assert replace(one, output="max context per user: 8,545 tokens\n").differs() == (
        "'max context per user: 8,544 tokens' instead of 'max context per user: 8,545 tokens'"
    )
    assert replace(one, output=one.output + "and more\n").differs() == "'no line' instead of 'and more'"
    assert replace(one, output="…\n").differs() == ""
