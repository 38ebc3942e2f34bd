"""Places with servers and a router each, behind a router, in networks of their own with ways of several lengths: who
answers, what becomes of streams when a way is cut, and what if the places have other weights.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
from pathlib import Path

import pytest

from helpers.places import FAR, NEAR, text_streamed, two_places
from helpers.unix_server import ask, text_of, until
from quire.config.shipped import DEFAULT_MODEL, shipped_models

pytestmark = pytest.mark.chaos
TOKENS = 900


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The small model."""
    return shipped_models()[DEFAULT_MODEL]


def test_near_places_answer_and_far_ones_take_over(tmp_path: Path, model: Path) -> None:
    """The near place answers what is asked one after the other. When the way to it is cut in the middle of a stream,
    the far one goes on with it, and the text is that of one that was not cut; it answers until the way is there again.
    When the near server is killed, its place is passed over at once."""
    with two_places(tmp_path, [model, model]) as places:
        trips = [each["round_trip_ms"] for each in places.get("/router/backends")["data"]]
        assert trips[0] >= 2e3 * NEAR
        assert trips[1] >= 2e3 * FAR
        assert {places.asked() for _ in range(6)} == {"place-1"}
        whole = text_streamed(ask(places.path, TOKENS, stream=True))
        stream = ask(places.path, TOKENS, stream=True)
        beginning = stream.read(2000)
        assert stream.getheader("x-quire-backend") == "place-1"
        places.networks.way(1, "cut")
        assert text_streamed(stream, beginning) == whole
        assert {places.asked() for _ in range(3)} == {"place-2"}
        places.networks.way(1, NEAR)
        until(lambda: places.asked() == "place-1")
        text = text_of(places.path)
        os.killpg(places.servers[0].pid, signal.SIGKILL)
        assert text_of(places.path) == text
        until(lambda: places.states()[0].startswith("down"))
        assert {places.asked() for _ in range(3)} == {"place-2"}


def test_ways_that_change_change_who_answers(tmp_path: Path, model: Path) -> None:
    """What counts is the way as it is now."""
    with two_places(tmp_path, [model, model]) as places:
        assert places.asked() == "place-1"
        places.networks.way(1, FAR)
        places.networks.way(2, NEAR)
        until(lambda: places.asked() == "place-2")
        assert {places.asked() for _ in range(3)} == {"place-2"}


def test_places_with_other_weights_answer_only_if_there_is_no_other(tmp_path: Path, model: Path) -> None:
    """A stream of the lost place does not go on with other weights; what is asked after that is answered by them, until
    the place is back whose weights have more capacity."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = next(other.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-4096:-2048] = data[-2048:]
    file.write_bytes(data)
    with two_places(tmp_path, [model, other], near=2.0) as places:
        versions = [each["versions"] for each in places.get("/router/backends")["data"]]
        assert versions[0] != versions[1]
        assert {places.asked() for _ in range(4)} == {"place-1"}
        stream = ask(places.path, TOKENS, stream=True)
        beginning = stream.read(2000)
        places.networks.way(1, "cut")
        with pytest.raises((http.client.HTTPException, AssertionError)):
            text_streamed(stream, beginning)
        until(lambda: places.states()[0].startswith("down"))
        assert {places.asked() for _ in range(3)} == {"place-2"}
        places.networks.way(1, NEAR)
        until(lambda: places.asked() == "place-1")


def test_an_unruly_way_changes_no_text(tmp_path: Path, model: Path) -> None:
    """Packets to the near place and back are lost, doubled, damaged and overtaken by others. It, or the far one, gives
    the text all the same, and where the near one counts as silent its streams go on there."""
    with two_places(tmp_path, [model, model]) as places:
        whole = text_streamed(ask(places.path, TOKENS, stream=True))
        places.networks.way(1, "unruly")
        for _ in range(4):
            assert text_streamed(ask(places.path, TOKENS, stream=True)) == whole
        places.networks.way(1, NEAR)
        until(lambda: places.states() == ["ready", "ready"])
        until(lambda: all(each["requests"] == 0 for each in places.get("/router/backends")["data"]))
