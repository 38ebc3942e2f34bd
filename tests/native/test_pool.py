"""How tasks are shared out among threads, threads among processors, and cache pages touched ahead of use."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helpers.processors import EVERY, on_every_processor
from quire import _native

PAGE = mmap.PAGESIZE
CHUNK = 2 << 20  # what a warmer touches at a time


def test_a_thread_takes_its_own_range_from_the_front() -> None:
    tasks = _native.Tasks(3)
    tasks.deal(10)  # 0 1 2 · 3 4 5 · 6 7 8 9
    assert [tasks.claim(1) for _ in range(3)] == [3, 4, 5]
    assert [tasks.claim(0) for _ in range(2)] == [0, 1]


def test_a_thread_without_tasks_takes_from_the_back_of_the_next() -> None:
    tasks = _native.Tasks(3)
    tasks.deal(9)
    assert [tasks.claim(2) for _ in range(3)] == [6, 7, 8]
    assert [tasks.claim(2) for _ in range(2)] == [2, 1]  # thread 0 is the next one after the last
    assert tasks.claim(0) == 0
    assert [tasks.claim(0) for _ in range(3)] == [5, 4, 3]
    assert [tasks.claim(thread) for thread in range(3)] == [-1, -1, -1]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_tasks_than_threads(count: int) -> None:
    tasks = _native.Tasks(4)
    tasks.deal(count)
    assert sorted(tasks.claim(3) for _ in range(count)) == list(range(count))
    assert tasks.claim(3) == -1
    tasks.deal(1)  # dealt anew
    assert tasks.claim(0) == 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_is_done_once_by_one_thread(threads: int) -> None:
    phases = [0, 1, 7, 1000, 0, 64, 3] * 20
    for count, claimed in zip(phases, _native.claim_all(threads, phases), strict=True):
        assert sorted(task for one in claimed for task in one) == list(range(count))
        for thread, one in enumerate(claimed):
            begin, end = count * thread // threads, count * (thread + 1) // threads
            own = [task for task in one if begin <= task < end]
            assert own == sorted(own)  # its own range from the front
            assert one[: len(own)] == own  # before it helps others


ALLOWED = EVERY
several = pytest.mark.skipif(len(ALLOWED) < 2, reason="this process may use one processor only")


def in_thread(job: Callable[[], None]) -> None:
    """Run a job in a thread of its own, whose affinity is its own too; its exception, raised here."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    with on_every_processor():
        thread = threading.Thread(target=run)
        thread.start()
    thread.join()
    if failed:
        raise failed[0]


@several
def test_a_thread_leaves_a_processor_that_another_was_seen_on() -> None:
    def job() -> None:
        places = _native.Processors(2)
        assert (places.seen(0), places.seen(1)) == (-1, -1)
        os.sched_setaffinity(0, ALLOWED[:1])
        places.note(0)
        os.sched_setaffinity(0, ALLOWED)
        assert places.seen(0) == ALLOWED[0]
        deadline = time.monotonic() + 60
        while not places.part(1):  # the kernel may have moved this thread by itself: back to where 0 was
            os.sched_setaffinity(0, ALLOWED[:1])
            os.sched_setaffinity(0, ALLOWED)
            assert time.monotonic() < deadline
        assert places.seen(1) in ALLOWED
        assert sorted(os.sched_getaffinity(0)) == ALLOWED

    in_thread(job)


@several
def test_a_thread_stays_where_it_is_alone_or_when_no_processor_is_free() -> None:
    def job() -> None:
        alone = _native.Processors(2)
        assert not alone.part(0)
        assert not alone.part(0)  # where it was seen itself

        os.sched_setaffinity(0, ALLOWED[:1])
        confined = _native.Processors(2)
        confined.note(0)
        assert not confined.part(1)
        assert os.sched_getaffinity(0) == set(ALLOWED[:1])

        crowded = _native.Processors(len(ALLOWED) + 1)
        for thread, processor in enumerate(ALLOWED):
            os.sched_setaffinity(0, [processor])
            crowded.note(thread)
        os.sched_setaffinity(0, ALLOWED)
        assert not crowded.part(len(ALLOWED))

    in_thread(job)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """8 untouched chunks."""
    area = mmap.mmap(-1, 8 * CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)  # so that a page that is in memory is one that was touched
    yield area
    area.close()


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def resident(area: mmap.mmap) -> list[bool]:
    """Which pages are in memory."""
    found = (ctypes.c_ubyte * (len(area) // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(address_of(area))
    assert libc.mincore(address, ctypes.c_size_t(len(area)), found) == 0
    return [bool(state & 1) for state in found]


def reaches(warmer: _native.PageWarmer, wanted: int) -> bool:
    """Whether this much memory is warmed within a minute; warming has the lowest priority on a busy machine."""
    deadline = time.monotonic() + 60
    while warmer.warmed < wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    return warmer.warmed >= wanted


def test_pages_are_touched_a_limited_way_ahead_of_use(memory: mmap.mmap) -> None:
    assert not any(resident(memory))  # negative control
    warmer = _native.PageWarmer(address_of(memory), len(memory), 2 * CHUNK)
    assert reaches(warmer, 2 * CHUNK)
    time.sleep(0.05)
    assert warmer.warmed == 2 * CHUNK
    pages = resident(memory)
    assert all(pages[: 2 * CHUNK // PAGE])
    assert not any(pages[2 * CHUNK // PAGE :])

    warmer.used(CHUNK + 1)
    assert reaches(warmer, 4 * CHUNK)  # whole chunks
    warmer.used(3 * CHUNK)  # more than stays ahead at rest: as much again
    assert reaches(warmer, 6 * CHUNK)
    time.sleep(0.05)
    assert warmer.warmed == 6 * CHUNK
    warmer.used(CHUNK)  # less than before: nothing to do
    warmer.used(len(memory))
    assert reaches(warmer, len(memory))
    assert all(resident(memory))
    assert not any(memory[:CHUNK])
    del warmer  # before the memory goes


def test_pages_are_not_touched_while_steps_run(memory: mmap.mmap) -> None:
    warmer = _native.PageWarmer(address_of(memory), len(memory), 2 * CHUNK)
    assert reaches(warmer, 2 * CHUNK)
    warmer.begin()
    warmer.used(len(memory))
    time.sleep(0.1)
    assert warmer.warmed == 2 * CHUNK
    warmer.end()
    assert reaches(warmer, len(memory))
    del warmer


def test_data_written_meanwhile_stays(memory: mmap.mmap) -> None:
    pattern = bytes(range(256)) * (PAGE // 256)
    warmer = _native.PageWarmer(address_of(memory), len(memory), len(memory))
    for at in range(0, len(memory), PAGE):
        memory[at : at + PAGE] = pattern
    assert reaches(warmer, len(memory))
    assert memory[:] == pattern * (len(memory) // PAGE)
    del warmer


def test_an_end_does_not_wait_for_the_rest(memory: mmap.mmap) -> None:
    for _ in range(20):
        warmer = _native.PageWarmer(address_of(memory), len(memory), len(memory))
        warmer.used(CHUNK)
        del warmer


def test_little_memory_has_no_thread(memory: mmap.mmap) -> None:
    warmer = _native.PageWarmer(address_of(memory), CHUNK, CHUNK)
    warmer.used(CHUNK)
    time.sleep(0.05)
    assert warmer.warmed == 0
    assert not any(resident(memory))
    del warmer
