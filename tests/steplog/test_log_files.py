"""What is read from a log is what was written: not after a cut, a flipped bit or a change of version."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path

import pytest

from quire.bench.simulated_arrivals import load_of_log
from quire.steplog import log_rows as rows
from quire.steplog.log_files import HEADER, LogError, LogFile, framed, read_log, read_rows
from quire.steplog.log_rows import SAMPLE_BITS, encode

from .storm import engine, request, storm


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("log") / "a.qlog"
    core, _ = storm(7, 12, file=LogFile(path, 2**24))
    assert core.recorder is not None
    core.recorder.close()
    return path.read_bytes()


def test_a_log_cut_anywhere_is_read_up_to_the_cut(log: bytes) -> None:
    whole = read_rows(log).rows
    assert len(whole) > 60
    rng = random.Random(0)
    for cut in sorted(
        {*range(len(HEADER), 400), *(rng.randrange(len(HEADER), len(log)) for _ in range(300))}
    ):
        found = read_rows(log[:cut], "a.qlog")
        assert found.rows == whole[: len(found.rows)]
        assert bool(found.damage) == (cut != end_of(log, len(found.rows)))
        if found.damage:
            assert "a.qlog: damaged at byte" in found.damage
            assert f"after {len(found.rows)} rows" in found.damage
    for cut in range(len(HEADER)):
        with pytest.raises(LogError, match="not a log"):
            read_rows(log[:cut])


def end_of(log: bytes, count: int) -> int:
    at = len(HEADER)
    for _ in range(count):
        at += 8 + int.from_bytes(log[at : at + 4], "little")
    return at


def test_a_step_takes_at_most_100_bytes_a_row(log: bytes) -> None:
    steps = [row for row in read_rows(log).rows if isinstance(row, rows.Step) and row.rows]
    assert any(len(step.rows) == 4 for step in steps)
    month, second = 30 * 86_400 * 10**9, 10**9
    long = rows.Step(
        10**8, month, second // 50, second, second + second // 50, 900_000, 60_000, 0, 0, 900_000, 100_000, 1000,
        (8192, 512), [10**7 << SAMPLE_BITS, 131_000, 1, 1],
    )  # fmt: skip
    for step in (*steps, long):
        assert len(framed(encode(step))) <= 100 * len(step.rows) // 4


def test_a_flipped_bit_is_seen(log: bytes) -> None:
    whole = read_rows(log).rows
    rng = random.Random(1)
    for _ in range(600):
        place = rng.randrange(len(HEADER), len(log))
        bad = bytearray(log)
        bad[place] ^= 1 << rng.randrange(8)
        found = read_rows(bytes(bad))
        assert found.damage
        assert found.rows == whole[: len(found.rows)]
        assert end_of(log, len(found.rows)) <= place


def test_random_bytes_after_a_header_are_refused_in_words() -> None:
    rng = random.Random(2)
    for _ in range(300):
        found = read_rows(HEADER + rng.randbytes(rng.randrange(1, 200)))
        assert found.rows == []
        assert found.damage
    for body in (b"", b"\x90", encode([1, 2]), encode([99]), b"\x91\x04", encode({"a": 1})):
        assert "unknown contents" in read_rows(HEADER + framed(body)).damage


def test_another_version_is_refused_with_its_number(log: bytes, tmp_path: Path) -> None:
    path = tmp_path / "b.qlog"
    path.write_bytes(log[:8] + (7).to_bytes(2, "little") + log[10:])
    with pytest.raises(LogError, match=r"b\.qlog: version 7 of the log, and this program reads version 1"):
        read_log(path)
    with pytest.raises(LogError, match="No such file"):
        read_log(tmp_path / "none")


def test_files_are_private_bounded_and_kept_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.qlog"
    core, _ = storm(3, 40, file=LogFile(path, 2**15))
    before = path.with_name("a.qlog.1")
    for file in (path, before):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size <= 2**14
    first = read_log(before).rows[0]
    later = read_log(path).rows[0]
    assert isinstance(first, rows.Opened)
    assert isinstance(later, rows.Opened)
    assert later.part == first.part + 1
    with pytest.raises(LogError, match="written by another engine"):
        LogFile(path, 2**20)
    assert core.recorder is not None
    assert core.recorder._file is not None
    core.recorder._file.close()  # as when the process dies: the last row is not that of an orderly end
    left = path.read_bytes()
    LogFile(path, 2**20).close()
    assert path.with_name("a.qlog.crash").read_bytes() == left


def test_a_file_that_was_closed_is_written_anew_and_no_other_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "a.qlog"
    core, _ = storm(3, 3, file=LogFile(path, 2**20))
    assert core.recorder is not None
    core.recorder.close()
    assert read_log(path).closed
    LogFile(path, 2**20).close()
    assert not path.with_name("a.qlog.crash").exists()
    other = tmp_path / "notes.txt"
    other.write_text("text that is no log")
    with pytest.raises(LogError, match="is no log"):
        LogFile(other, 2**20)
    assert other.read_text() == "text that is no log"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LogError):
        LogFile(link, 2**20)


def test_a_log_has_no_tokens_unless_they_are_asked_for(tmp_path: Path) -> None:
    secret = [1_000_003, 1_000_033, 1_000_037, 1_000_039] * 5
    for prompts in (False, True):
        path = tmp_path / f"{prompts}.qlog"
        core, _, clock = engine(1, file=LogFile(path, 2**20), prompts=prompts)
        for name, tail in (("a", 1_000_081), ("b", 1_000_099)):
            request(core, name, [*secret, tail], clock, max_tokens=2)
            while core.has_work():
                core.step()
        missed = [row for row in read_log(path).rows if isinstance(row, rows.Missed)]
        assert missed
        assert not any(row.ours for row in missed)
        request(core, "c", [*secret[:6], 5, *secret], clock, max_tokens=2)
        core.step()
        data = path.read_bytes()
        forms = [
            form for token in set(secret) for form in (token.to_bytes(4, "little"), token.to_bytes(4, "big"))
        ]
        assert any(form in data for form in forms) is prompts


def test_a_file_that_is_written_ends_in_zeros(tmp_path: Path) -> None:
    """What a process leaves that dies: all its rows, and room for others."""
    path = tmp_path / "a.qlog"
    core, _ = storm(3, 10, file=LogFile(path, 2**22))
    log, data = read_log(path), path.read_bytes()
    assert not log.damage
    assert not log.closed
    assert data[-1000:] == bytes(1000)
    assert core.recorder is not None
    assert len(log.rows) == core.recorder._count
    damaged = bytearray(data)
    damaged[-500] = 1  # not all zeros: a row of no bytes
    assert "damaged" in read_rows(damaged).damage
    core.recorder.close()
    assert path.read_bytes().startswith(data.rstrip(b"\0"))
    assert path.stat().st_size < len(data)


def test_a_file_system_without_maps_gets_rows_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    path = tmp_path / "a.qlog"
    core, _ = storm(3, 10, file=LogFile(path, 2**22))
    assert core.recorder is not None
    assert len(read_log(path).rows) == core.recorder._count
    core.recorder.close()
    assert read_log(path).closed


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    core, _ = storm(3, 10, file=LogFile(tmp_path / "a.qlog", 2**22))
    assert core.recorder is not None
    assert "No space left" in core.recorder.trouble


def test_rows_are_small(tmp_path: Path) -> None:
    """At most 100 bytes a row of a step."""
    core, _ = storm(11, 60)
    assert core.recorder is not None
    log = read_rows(core.recorder.ring())
    steps = [row for row in log.rows if isinstance(row, rows.Step)]
    size = sum(len(framed(encode(row))) for row in steps)
    assert size <= 100 * sum(len(step.rows) // 4 for step in steps)
    alone = rows.Step(
        10**7, 10**16, 10**5, 3 * 10**7, 3 * 10**7 + 10**5, 10**4, 10**4, 0, 0, 10**4, 10**4, 0, (2048, 256),
        [10**6 << SAMPLE_BITS, 4000, 1, 1],
    )  # fmt: skip
    assert len(framed(encode(alone))) <= 100


def test_the_ring_is_bounded() -> None:
    core, _ = storm(2, 60)
    recorder = core.recorder
    assert recorder is not None
    recorder._ring_bytes = 2**13
    recorder.changed("costs", (1.0,))
    assert len(recorder.ring()) <= 2**13 + 1000
    assert not read_rows(recorder.ring()).damage


def test_the_rows_since_a_look_are_those_that_came_after_it() -> None:
    core, _ = storm(7, 12)
    recorder = core.recorder
    assert recorder is not None
    whole = read_rows(recorder.ring()).rows[1:]  # the first says what it is
    data, count = recorder.since(0)
    assert read_rows(data).rows == whole
    assert count == len(whole)
    assert read_rows(recorder.since(count - 3)[0]).rows == whole[-3:]
    assert recorder.since(count) == (HEADER, count)
    assert recorder.oldest == whole[0].at


def test_a_ring_without_a_file_knows_what_prompts_share_also_with_those_it_has_lost() -> None:
    core, _, clock = engine(1, num_blocks=200, max_model_len=200)
    assert core.recorder is not None
    core.recorder._ring_bytes = 6000
    system, other = list(range(1, 25)), list(range(60, 84))
    for i in range(30):
        base = system if i % 2 else other
        request(core, f"r{i}", [*base, 30 + i, 100 + i], clock, max_tokens=2, ignore_eos=True)
        while core.has_work():
            core.step()
    log = read_rows(core.recorder.ring())
    kept = [row for row in log.rows if isinstance(row, rows.Arrived)]
    assert 2 < len(kept) < 28
    assert {row.chain.like[0] for row in kept} <= {0, 1}, "their rows are gone"
    assert {row.chain.shared for row in kept} == {24 // 4}
    prompts = {one.at: list(one.prompt) for one in load_of_log(log).arrivals}
    begins = [tuple(prompt[:24]) for prompt in prompts.values()]
    assert len(set(begins)) == 2
    assert all(first == third for first, third in zip(begins, begins[2:], strict=False))
    assert len({tuple(prompt) for prompt in prompts.values()}) == len(prompts)
