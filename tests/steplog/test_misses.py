"""Why a prompt was not in the cache: the token that a test has changed is named, and what kind of text it is."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.cache_misses import AROUND
from quire.engine.core import EngineCore
from quire.steplog.log_files import read_rows
from quire.steplog.log_rows import Arrived, Missed
from quire.steplog.misses import (
    IDENTIFIER,
    KEY_ORDER,
    NUMBER,
    OTHER,
    SPACES,
    TIMESTAMP,
    MissText,
    templates,
    what_changes,
)

from .storm import Clock, engine, request

SIZE = 4  # of the storm's blocks


def missed(core: EngineCore, clock: Clock, prompt: list[int], **facts: Any) -> Missed | None:
    """What the log says of a prompt that is asked now, and runs to its end."""
    assert core.recorder is not None
    name = f"r{len([r for r in read_rows(core.recorder.ring()).rows if isinstance(r, Arrived)])}"
    request(core, name, prompt, clock, max_tokens=1, ignore_eos=True, **facts)
    while core.has_work():
        core.step()
    log = read_rows(core.recorder.ring()).rows
    number = next(row.number for row in log if isinstance(row, Arrived) and row.request_id == name)
    return next((row for row in log if isinstance(row, Missed) and row.number == number), None)


@pytest.mark.parametrize("seed", range(40))
def test_the_token_that_was_changed_is_named(seed: int) -> None:
    rng = random.Random(seed)
    core, _, clock = engine(seed, num_blocks=200, max_model_len=200)
    prompt = [rng.randrange(1, 40) for _ in range(rng.randint(10, 150))]
    at = rng.randrange(1, len(prompt))
    other = [*prompt[:at], 41, *prompt[at + 1 :]]
    assert missed(core, clock, prompt) is not None
    found, whole = missed(core, clock, other), (len(prompt) - 1) // SIZE * SIZE
    if at >= whole:
        assert found is None, "no whole block was missed"
        return
    assert found is not None
    assert (found.kind, found.differs_at) == ("differs", at)
    assert (found.hit, found.hit + found.lost) == (at // SIZE * SIZE, whole)
    middle = min(AROUND, at)
    assert (found.ours[middle], found.theirs[middle]) == (41, prompt[at])
    assert found.ours[:middle] == found.theirs[:middle] == tuple(prompt[at - middle : at])
    assert found.theirs[middle:] == tuple(prompt[at : at + AROUND])[: len(found.theirs) - middle]
    assert missed(core, clock, other) is None


def test_what_gave_way_is_told_apart_from_what_never_was() -> None:
    core, _, clock = engine(1, num_blocks=14)
    first, second = [*range(1, 41)], [*range(50, 90)]
    for prompt in (first, second):
        found = missed(core, clock, prompt)
        assert found is not None
        assert found.kind == "never seen"
    found = missed(core, clock, first)
    assert found is not None
    assert found.kind == "evicted"
    assert found.ours == found.theirs == ()


def test_what_is_remembered_of_evicted_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.cache_misses.EVICTED", 0)
    core, _, clock = engine(1, num_blocks=14)
    found = [missed(core, clock, prompt) for prompt in ([*range(1, 41)], [*range(50, 90)], [*range(1, 41)])]
    assert "evicted" not in {one.kind for one in found if one is not None}


def test_another_namespace_is_named_and_another_tenant_is_not_seen() -> None:
    core, _, clock = engine(1, num_blocks=100)
    prompt = [*range(1, 30)]
    missed(core, clock, prompt, namespace="x", tenant="a")
    there = missed(core, clock, prompt, namespace="y", tenant="a")
    theirs = missed(core, clock, [*prompt[:9], 41, *prompt[10:]], namespace="x", tenant="b")
    assert there is not None
    assert theirs is not None
    assert there.kind == "another namespace"
    assert (theirs.kind, theirs.theirs) == ("never seen", ())


@pytest.mark.parametrize(
    ("before", "ours", "theirs", "kind"),
    [
        ("Today is 2026-11-", "20 and all is", "31 and all is", TIMESTAMP),
        ("It is ", "Mon, 10:15", "Tue, 10:15", TIMESTAMP),
        ("x-request-id: ", "3f2504e0-4f89-41d3-9a0c", "9b2d6a10-11aa-4c3b-8d1f", IDENTIFIER),
        ("session ", "8f14e45fceea167a5a36", "c9f0f895fb98ab9159f5", IDENTIFIER),
        ("You have ", "17 mails", "4 mails", NUMBER),
        ('{"', 'a": 1, "b": 2}', 'b": 2, "a": 1}', KEY_ORDER),
        ("one", " two", "two", SPACES),
        ("one", "  \n", " x", SPACES),
        ("the ", "cat sat", "dog sat", OTHER),
    ],
)
def test_the_kind_of_text_that_changes(before: str, ours: str, theirs: str, kind: str) -> None:
    assert what_changes(before, ours, theirs) == kind


def test_templates_are_grouped_by_their_beginning_and_rank_by_what_they_lost() -> None:
    def one(number: int, begun: int, lost: int) -> tuple[Missed, MissText]:
        text = [*f"{begun} is 2026-01-", *"05 noon"]
        miss = Missed(
            0, number, "differs", 0, lost, len(text) - 7,
            tuple(map(ord, text[-AROUND - 7 :])), tuple(map(ord, "06 noon".rjust(len(text)))),
        )  # fmt: skip
        return miss, MissText.of(miss, lambda ids: "".join(map(chr, ids)), own=number % 2 == 0)

    found = templates([one(0, 1, 16), one(1, 2, 20), one(2, 1, 16), one(3, 1, 16)])
    assert [(each.requests, each.lost, each.text.changes) for each in found] == [
        (3, 48, TIMESTAMP),
        (1, 20, TIMESTAMP),
    ]
    assert found[1].text.theirs == "", "what others have cached is not shown"
