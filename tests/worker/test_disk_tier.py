"""KV blocks in a file: they are found by the next process and by others, and nothing wrong is ever read."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.worker.disk_tier import DiskTier
from quire.worker.kept_blocks import buffers_of
from quire.worker.kv_file import PAGE, RECORD_BYTES, U8, KvFile, KvFileError, KvLayout, places_in

from .keeping import BLOCK, MARK, content_of, fetch, keep, name_of, wait

SIZE = 12 * (2 * PAGE + RECORD_BYTES) + 2 * PAGE  # twelve places

Make = Callable[..., DiskTier]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[DiskTier] = []

    def tier(folder: str = "kv", *, size: int = SIZE, block: int = BLOCK, mark: bytes = MARK) -> DiskTier:
        made.append(DiskTier(tmp_path / folder, size, block, mark))
        return made[-1]

    yield tier
    for one in made:
        if one._threads[0].is_alive():
            one.close()


def test_what_is_kept_is_found_by_the_next_process(make: Make) -> None:
    tier = make()
    keep(tier, 1, 2, 3)
    assert not tier.reserve(name_of(2)), "it is there already"
    assert fetch(tier, 1, 2, 3, 4) == [1, 2, 3]
    tier.close()
    again = make()
    wait(lambda: len(again) == 3)
    assert again.path == tier.path
    assert [again.holds(name_of(number)) for number in range(5)] == [False, True, True, True, False]
    assert fetch(again, 3, 1, 4) == [1, 3]
    assert again.blocks_in == 2


def test_the_block_used_longest_ago_makes_room(make: Make) -> None:
    tier = make()
    keep(tier, *range(12))
    assert fetch(tier, 0) == [0]
    keep(tier, 12, 13)
    assert not tier.holds(name_of(1))
    assert not tier.holds(name_of(2))
    assert fetch(tier, *range(14)) == [0, *range(3, 14)]
    assert tier.path.stat().st_size <= SIZE
    assert tier.path.stat().st_mode & 0o777 == 0o600


def test_processes_share_what_they_have(make: Make) -> None:
    first = make()
    keep(first, 1, 2)
    second = make()
    assert second.path != first.path
    wait(lambda: second.holds(name_of(2)))
    assert fetch(second, 1, 2) == [1, 2]
    assert not second.reserve(name_of(1)), "another process has it"
    keep(first, *range(3, 14))  # of which the last takes the place of 1 or 2
    assert fetch(second, 1, 2) in ([1], [2]), "the other file names something else there now"
    first.close()
    assert fetch(second, *range(3, 8)) == [], "not looked for yet, or found"


def test_another_model_finds_nothing(make: Make) -> None:
    keep(first := make(), 1)
    other = make(mark=b"n" * 64)
    time.sleep(0.05)
    assert not other.holds(name_of(1))
    first.close()
    other.close()
    third = make(mark=b"o" * 64)
    assert third.path == first.path, "no file that a process has, and the number of files does not grow"
    time.sleep(0.05)
    assert len(third) == 0
    third.close()
    back = make(mark=b"n" * 64)
    assert back.path == other.path, "its own blocks before any other file"


@pytest.mark.parametrize("what", ["content", "record", "swapped", "cut"])
def test_what_was_changed_is_never_read(make: Make, what: str) -> None:
    tier = make()
    keep(tier, 1, 2, 3)
    tier.close()
    layout = KvLayout(MARK, BLOCK, places_in(SIZE, BLOCK))
    with tier.path.open("r+b") as file:
        places = {
            digest: place for place, digest, _, _ in KvFile(tier.path, file.fileno(), layout).table()[0]
        }
        one, two = (places[name_of(number)[0]] for number in (1, 2))
        starts = [PAGE + RECORD_BYTES * one, PAGE + RECORD_BYTES * two]
        if what == "content":
            at = layout.contents + one * layout.pitch + 4321
        elif what == "record":
            at = starts[0] + 40  # in its check sum
        if what in {"content", "record"}:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
        elif what == "swapped":
            records = [os.pread(file.fileno(), RECORD_BYTES, start) for start in starts]
            for start, record in zip(starts, reversed(records), strict=True):
                os.pwrite(file.fileno(), record, start)
        else:
            file.truncate(layout.contents + 2 * layout.pitch)
    again = make()
    if what == "cut":
        time.sleep(0.05)
        assert len(again) == 0, "made anew"
        return
    wait(lambda: len(again) == 3)
    assert fetch(again, 1, 2, 3) == ([3] if what == "swapped" else [2, 3])
    wait(lambda: not again.holds(name_of(1)))
    assert again.damaged == (2 if what == "swapped" else 1)
    keep(again, 1)
    assert fetch(again, 1) == [1]


def test_blocks_that_come_too_fast_are_not_kept(make: Make) -> None:
    tier, (most, _) = make(), buffers_of(BLOCK)
    reserved = sum(tier.reserve(name_of(number)) for number in range(most + 5))
    assert (reserved, tier.refused, tier.room) == (most, 5, 0)
    tier.forget(name_of(0))  # before its content came
    assert not tier.awaits(name_of(0))
    assert tier.room == 1


def test_what_may_be_damaged_is_forgotten(make: Make) -> None:
    tier = make()
    keep(tier, 1, 2)
    tier.forget(name_of(1))
    wait(lambda: not tier.holds(name_of(1)))
    tier.close()
    again = make()
    wait(lambda: again.holds(name_of(2)))
    assert not again.holds(name_of(1))
    again.clear()
    wait(lambda: not again.holds(name_of(2)))


def test_an_error_of_the_disk_ends_the_tier_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tier = make()
    keep(tier, 1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.worker.kv_file.os.pwrite", full)
    assert tier.reserve(name_of(2))
    tier.write(name_of(2), content_of(2))
    wait(lambda: bool(tier.error))
    assert not tier.holds(name_of(1))
    assert not tier.reserve(name_of(3))
    assert fetch(tier, 1) == []
    said = capfd.readouterr().err
    assert said.count("No space left on device; KV blocks are neither kept nor read any more") == 1


def test_a_folder_that_cannot_be_had_is_an_error_at_the_start(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(KvFileError, match=r"Not a directory|File exists"):
        make("file")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "blocks-0.kv").symlink_to(tmp_path / "file")
    with pytest.raises(KvFileError, match="symbolic links"):
        make()
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(KvFileError, match=r"No space left|File too large|Cannot allocate|space"):
        make("huge", size=2**60)
    with pytest.raises(ValueError, match="kv_tiers: disk has no room for a block of 5000 bytes"):
        make("small", size=BLOCK)


WRITER = """
import sys; sys.path.insert(0, {tests!r})
from worker.test_disk_tier import *
tier = DiskTier(Path({folder!r}), SIZE, BLOCK, MARK)
number = said = 0
while True:
    if tier.room and tier.reserve(name_of({first} + number)):
        tier.write(name_of({first} + number), content_of({first} + number))
        number += 1
    if not said and tier.blocks_out > 12:
        said = print("writing", flush=True) or 1
"""


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.chaos)])
def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(
    make: Make, tmp_path: Path, times: int
) -> None:
    rng, first = random.Random(times), 0
    for _ in range(times):
        code = WRITER.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "kv"), first=first)
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        tier = make()
        wait(tier.is_loaded)
        held = [number for number in range(first, first + 10_000) if tier.holds(name_of(number))]
        assert len(held) >= 11
        assert len(fetch(tier, *held)) >= len(held) - 1, "only that in whose place another was being written"
        tier.close()
        first += 10_000


def test_a_full_file_takes_from_the_tenant_with_the_most(make: Make) -> None:
    """Also after a restart, and a tenant alone has it all."""
    tier = make()

    def kept(tenant: str, *numbers: int) -> None:
        for number in numbers:
            wait(lambda: tier.room > 0)
            assert tier.reserve(name_of(number), tenant)
            tier.write(name_of(number), content_of(number))
        wait(lambda: not tier.writes)

    kept("few", 100, 101, 102)
    kept("many", *range(12))  # three of them give way to their own tenant's
    there = [number for number in (*range(12), 100, 101, 102) if tier.holds(name_of(number))]
    assert there == [*range(3, 12), 100, 101, 102]
    tier.close()
    tier = make()
    wait(lambda: len(tier) == 12)
    kept("many", 12, 13)
    kept("third", 200, 201)
    assert fetch(tier, 100, 101, 102, 200, 201) == [100, 101, 102, 200, 201]
    assert [number for number in range(14) if tier.holds(name_of(number))] == [*range(7, 14)]
    kept("few", *range(103, 110))
    count = {who: sum(tier.holds(name_of(n)) for n in range(*span)) for who, span in
             {"few": (100, 110), "many": (0, 14), "third": (200, 202)}.items()}  # fmt: skip
    assert count == {"few": 5, "many": 5, "third": 2}
    assert {len(each) for each in tier._owned.values()} == {5, 2}


def test_an_encrypted_file_shows_nothing(make: Make, tmp_path: Path) -> None:
    key = b"a key for a file of blocks"
    tier = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK, key)
    same = np.zeros(BLOCK, np.uint8)
    for number in (1, 2):
        assert tier.reserve(name_of(number))
        tier.write(name_of(number), same)
    keep(tier, 3, 4)
    assert fetch(tier, 3, 4, 5) == [3, 4]
    tier.close()
    raw = tier.path.read_bytes()
    layout = KvLayout(MARK, BLOCK, places_in(SIZE, BLOCK))
    starts = [layout.contents + place * layout.pitch for place in range(4)]
    sealed = [raw[start : start + BLOCK] for start in starts]
    assert len({*sealed}) == 4, "equal contents do not look equal"
    assert all(bytes(16) not in each for each in sealed)
    for number in (1, 2, 3, 4):
        assert name_of(number)[0] not in raw, "names are hashed"
    assert content_of(3).tobytes()[:64] not in raw
    again = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK, key)
    wait(lambda: len(again) == 4)
    assert fetch(again, 3, 4) == [3, 4]
    second = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK, key)  # beside it
    wait(lambda: second.holds(name_of(3)))
    assert fetch(second, 3, 4) == [3, 4]
    second.close()
    again.close()
    with tier.path.open("r+b") as file:  # each bit of a record and of a content counts
        for at in (PAGE + 2, PAGE + 30, PAGE + 45, PAGE + 52, PAGE + 60, layout.contents + 17):
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
            broken = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK, key)
            wait(broken.is_loaded)
            broken.read(1, name_of(1))
            found: list[tuple[int, U8 | None]] = []
            while not found:
                found += broken.arrived(64)
            assert found[0][1] is None, at
            broken.close()
            os.pwrite(file.fileno(), bytes([byte]), at)
    other = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK, b"another key of sixteen bytes")
    plain = DiskTier(tmp_path / "sealed", SIZE, BLOCK, MARK)
    for each in (other, plain):
        wait(each.is_loaded)
        assert not any(each.holds(name_of(number)) for number in range(1, 5))
        each.close()
