"""Stop strings: no prefix leaks, the first match ends it, and the cuts between deltas never matter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.stop import MAX_STOP_CHARS_TOTAL, StopStrings
from quire.types import RequestError

letters = st.sampled_from("ab\n")
stops_of = st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=4)
bounded = settings(max_examples=400)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the match that ends first; of those ending together the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@bounded
@given(st.lists(st.text(letters, max_size=6), max_size=12), stops_of, st.booleans())
def test_any_cut_gives_the_same_as_the_whole_text(deltas, stops, include):
    matcher = StopStrings(stops).matcher(include=include)
    shown, text, matched = "", "", None
    for delta in deltas:
        emitted, found = matcher.push(delta)
        text += delta
        shown += emitted
        matched = found
        # Everything that cannot be part of a stop string is out at once, and nothing else.
        if matched is None:
            held = text[len(shown) :]
            assert shown + held == text
            assert not held or any(stop.startswith(held) for stop in stops)
            longer = [
                text[start:] for start in range(len(shown)) if any(s.startswith(text[start:]) for s in stops)
            ]
            assert not longer
    if matched is None:
        shown += matcher.finish()
    assert (shown, matched) == expected("".join(deltas), stops, include)


def test_the_string_is_held_across_deltas_and_cut():
    matcher = StopStrings(["\n\nHuman:", "###"]).matcher()
    assert [matcher.push(delta) for delta in ("Hi", "\n", "\n", "Hum", "our\n", "##", " ")] == [
        ("Hi", None),
        ("", None),
        ("", None),
        ("", None),
        ("\n\nHumour", None),
        ("\n", None),
        ("## ", None),
    ]
    assert matcher.push("a\n\nHuman: b") == ("a", "\n\nHuman:")
    assert matcher.push("more") == ("", "\n\nHuman:")
    assert matcher.finish() == ""


def test_include_shows_the_stop_string_and_nothing_after():
    matcher = StopStrings(["END"]).matcher(include=True)
    assert matcher.push("to the E") == ("to the ", None)
    assert matcher.push("ND of") == ("END", "END")


def test_finish_releases_held_text():
    matcher = StopStrings(["stop"]).matcher()
    assert matcher.push("full sto") == ("full ", None)
    assert matcher.finish() == "sto"


def test_samples_share_the_automaton_but_not_the_state():
    stops = StopStrings(["ab"])
    first, second = stops.matcher(), stops.matcher()
    assert first.push("a") == ("", None)
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")


def test_no_stop_strings_let_everything_through():
    matcher = StopStrings([]).matcher()
    assert matcher.push("anything") == ("anything", None)


def test_work_is_linear_in_the_text():
    """The adversary of naive matching: every position nearly matches. Steps are counted, not timed."""

    class Counting(StopStrings):
        steps = 0

        def step(self, state: int, char: str) -> int:
            Counting.steps += 1
            return super().step(state, char)

    matcher = Counting(["a" * 4000 + "b"]).matcher()
    Counting.steps = 0
    for _ in range(2000):
        matcher.push("aaaaa")
    assert Counting.steps == 10_000
    assert len(matcher._held) == 4000


def test_limits_are_named():
    with pytest.raises(RequestError, match=f"exceed the limit of {MAX_STOP_CHARS_TOTAL}"):
        StopStrings(["x" * 4096] * 9)
    with pytest.raises(RequestError, match="non-empty"):
        StopStrings(["a", ""])
