"""KV blocks in a Redis: what engines find there, that nothing wrong is ever read, and what Redis sees of it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.redis_servers import FakeRedis, RealRedis, redis_server
from quire.config.kv_tiers import parse_tiers
from quire.worker import outages, redis_tier
from quire.worker.kv_wire import NAME
from quire.worker.redis_tier import RedisTier, redis_bytes

from .keeping import BLOCK, MARK, content_of, fetch, keep, name_of, wait

client = pytest.importorskip("redis", reason="needs redis-py, which is optional")

BOTH = [pytest.param("fake", id="fake"), pytest.param("real", id="real", marks=pytest.mark.redis)]
KEY = b"a key that engines have"
Server = FakeRedis | RealRedis
Make = Callable[..., RedisTier]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)
    monkeypatch.setattr(outages, "PAUSES", (0.05, 0.1))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What tiers tell."""
    lines: list[str] = []
    monkeypatch.setattr(outages, "say", lines.append)
    return lines


def heard(said: list[str], text: str) -> bool:
    return any(text in line for line in said)


@pytest.fixture(params=BOTH)
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with redis_server(request.param, tmp_path, "--maxmemory", "64mb") as server:
        yield server


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRedis]:
    with redis_server("fake", tmp_path) as server:
        assert isinstance(server, FakeRedis)
        yield server


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RedisTier] = []

    def tier(server: Server, key: bytes = b"", mark: bytes = MARK) -> RedisTier:
        made.append(RedisTier(server.url, BLOCK, mark, key))
        return made[-1]

    yield tier
    for one in made:
        one.close()


def look_into(server: Server) -> Any:
    """A client of what is there, in the fake's own tables or over the wire."""
    return server.kept if isinstance(server, FakeRedis) else client.Redis.from_url(server.url)


def values_of(server: Server) -> dict[bytes, bytes]:
    """Keys and values of blocks."""
    found = look_into(server)
    if isinstance(server, FakeRedis):
        return dict(found.values)
    with contextlib.closing(found):
        return {key: found.get(key) for key in found.keys("quire:kv:*") if found.type(key) == b"string"}


def put_value(server: Server, key: bytes, value: bytes) -> None:
    found = look_into(server)
    if isinstance(server, FakeRedis):
        found.values[key] = value
        return
    with contextlib.closing(found):
        found.set(key, value)


@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "encrypted"])
def test_engines_find_what_others_have_kept(make: Make, redis: Server, key: bytes) -> None:
    first, second = make(redis, key), make(redis, key)
    keep(first, 1, 2, 3)
    wait(lambda: second.holds(name_of(3)))
    assert fetch(second, 1, 2, 3) == [1, 2, 3]
    assert not second.reserve(name_of(2)), "it is there already"
    assert (first.blocks_out, second.blocks_in) == (3, 3)
    late = make(redis, key)
    wait(lambda: late.holds(name_of(3)))
    assert fetch(late, 1, 4) == [1]
    second.forget(name_of(1))
    wait(lambda: len(values_of(redis)) == 2)
    assert fetch(late, 1) == []
    assert not late.holds(name_of(1))
    late.clear()
    assert not late.holds(name_of(2))
    other = make(redis, key, b"n" * 64)
    wait(lambda: other.works)
    keep(other, 4)
    assert fetch(other, 1, 2, 4) == [4], "another model's blocks are not found under the same names"


def test_a_key_hides_contents_and_names(make: Make, redis: Server) -> None:
    plain, sealed = make(redis), make(redis, KEY)
    for tier in (plain, sealed):
        keep(tier, 1)
    values = values_of(redis)
    parts = content_of(1).tobytes()[100:164], name_of(1)[0].hex().encode()
    seen = [parts[0] in value or parts[1] in key for key, value in values.items()]
    assert sorted(seen) == [False, True], "the plain one alone shows what it is"
    assert MARK not in b"".join([*values, *values.values()])
    stranger = make(redis, b"another key of engines")
    wait(lambda: stranger.works)
    assert not stranger.holds(name_of(1))
    assert fetch(stranger, 1) == []
    assert stranger.damaged == 0


@pytest.mark.parametrize("key", [b"", KEY], ids=["plain", "encrypted"])
def test_what_was_changed_there_is_not_believed_and_removed(make: Make, redis: Server, key: bytes) -> None:
    tier = make(redis, key)
    keep(tier, *range(6))
    by_name = {tier._key(tier._named(name_of(number))): number for number in range(6)}
    values = {by_name[key]: (key, value) for key, value in values_of(redis).items()}
    changed = bytearray(values[0][1])
    changed[-1] ^= 1
    put_value(redis, values[0][0], bytes(changed))
    put_value(redis, values[1][0], values[2][1])  # of another name
    put_value(redis, values[3][0], values[3][1][:-1])
    put_value(redis, values[4][0], values[4][1] + b"more" * 10**6)
    assert fetch(tier, *range(6)) == [2, 5]
    assert tier.damaged == 4
    wait(lambda: len(values_of(redis)) == 2)


def test_a_redis_that_is_gone_or_hangs_costs_nothing_but_its_blocks(
    make: Make, redis: Server, said: list[str]
) -> None:
    tier = make(redis)
    keep(tier, 1, 2, 3)
    redis.stop()
    assert fetch(tier, 1, 2, 3) == []
    wait(lambda: not tier.works)
    assert (tier.holds(name_of(1)), tier.room, tier.reserve(name_of(7))) == (False, 0, False)
    redis.start()  # with nothing in it
    wait(lambda: tier.works)
    assert not tier.holds(name_of(1))
    keep(tier, *range(1, 9))
    assert fetch(tier, *range(1, 9)) == [*range(1, 9)], "readers do not use connections from before"
    for line in ("KV blocks are computed until it can be used", "it answers again"):
        wait(lambda line=line: heard(said, line))  # type: ignore[misc]
        assert sum(line in each for each in said) == 1


def test_a_redis_that_was_emptied_is_known_to_be(make: Make, redis: Server) -> None:
    tier = make(redis)
    keep(tier, 1, 2)
    found = look_into(redis)
    if isinstance(redis, FakeRedis):
        found.values.clear()
        found.streams.clear()
    else:
        found.flushall()
        found.close()
    wait(lambda: not tier.holds(name_of(1)))
    assert tier.works
    keep(tier, 1)
    assert fetch(tier, 1, 2) == [1]


@pytest.mark.parametrize("slow", [False, True], ids=["silent", "a byte at a time"])
def test_a_call_ends_in_time(
    make: Make,
    fake: FakeRedis,
    monkeypatch: pytest.MonkeyPatch,
    slow: bool,
    said: list[str],
) -> None:
    tier = make(fake)
    keep(tier, 1, 2)
    assert fetch(tier, 1, 2) == [1, 2]
    monkeypatch.setattr(redis_tier, "CALL_SECONDS", 0.3)
    fake.stalled, fake.slow = not slow, 0.01 * slow
    begun = time.monotonic()
    assert fetch(tier, 1) == []
    assert time.monotonic() - begun < 20, "its 5,032 bytes would take 50 seconds"
    wait(lambda: not tier.works)
    wait(lambda: heard(said, "it does not answer in time"))
    fake.stalled, fake.slow = False, 0.0
    wait(lambda: tier.works)
    wait(lambda: fetch(tier, 1) == [1])


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (b"GETRANGE", b":5\r\n"), (b"GETRANGE", b"*1\r\n:5\r\n"), (b"GETRANGE", b"$many\r\n"),
        (b"GETRANGE", b"$-1\r\n"), (b"XRANGE", b":5\r\n"), (b"XRANGE", b"*1\r\n*2\r\n$3\r\n1-x\r\n*0\r\n"),
        (b"XRANGE", b"*1\r\n*2\r\n:99999999999\r\n*0\r\n"), (b"XREVRANGE", b"*1\r\n:5\r\n"),
        (b"XADD", b"*0\r\n"), (b"XADD", b":1\r\n"), (b"INFO", b":1\r\n"),
    ],
)  # fmt: skip
def test_answers_that_are_none_of_redis_end_the_connection_alone(
    make: Make, fake: FakeRedis, command: bytes, answer: bytes
) -> None:
    """No thread ends: nobody waits for a block for ever, and all goes on when answers are right again."""
    tier = make(fake)
    keep(tier, 1)
    assert fetch(tier, 1) == [1]
    fake.kept.nonsense[command] = answer
    if command == b"INFO":
        fake.stop()
        fake.start()
    if command == b"GETRANGE":
        assert fetch(tier, 1) == []
    elif command == b"XADD":
        assert tier.reserve(name_of(2))
        tier.write(name_of(2), content_of(2))
        wait(lambda: not tier.writes)
        assert not tier.holds(name_of(2))
    else:
        wait(lambda: not tier.works)
        assert fetch(tier, 1) == []
    assert all(thread.is_alive() for thread in tier._threads)
    fake.kept.nonsense.clear()
    wait(lambda: tier.works)
    wait(lambda: not tier.writes)
    if not tier.holds(name_of(1)):
        keep(tier, 1)
    wait(lambda: fetch(tier, 1) == [1])


@pytest.mark.parametrize("command", [b"GETRANGE", b"XRANGE", b"XREVRANGE"])
@pytest.mark.parametrize("form", ["text", "list", "depth"])
def test_an_answer_that_is_too_long_is_not_read(
    make: Make, fake: FakeRedis, command: bytes, form: str, said: list[str]
) -> None:
    """Whoever may write to Redis chooses how long a name is. No more of it is read than a right answer has."""
    read: list[int] = []
    count = redis_tier._BoundedSocket._count

    def counted(sock: redis_tier._BoundedSocket, size: int) -> None:
        read.append(size)
        count(sock, size)

    tier = make(fake)
    keep(tier, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_tier._BoundedSocket, "_count", counted)
        size = 8 * 2**20
        long = {"text": b"$%d\r\n" % size + bytes(size), "list": b"*%d\r\n" % size + b":1\r\n" * (size // 4),
                "depth": b"*1\r\n" * (size // 4)}  # fmt: skip
        fake.kept.nonsense[command] = long[form]
        if command == b"GETRANGE":
            assert fetch(tier, 1) == []
        wait(lambda: not tier.works)
        fake.kept.nonsense.clear()
        assert sum(read) < size / 2
    wait(lambda: heard(said, "KV blocks are computed until it can be used"))
    assert all(thread.is_alive() for thread in tier._threads)
    wait(lambda: tier.works)
    wait(lambda: fetch(tier, 1) == [1])


def test_names_that_never_end_are_skipped(
    make: Make, fake: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes names faster than they are read: the tier works all the same, knows so many of them at most, and
    ends when it should."""
    monkeypatch.setattr(redis_tier, "LISTED", 8)
    monkeypatch.setattr(redis_tier, "_MOST_LISTS", 3)
    monkeypatch.setattr(redis_tier, "MOST_NAMES", 30)
    honest, numbers = fake.kept.answer, itertools.count(1000)

    def flooded(words: list[bytes]) -> bytes:
        if words[0] == b"XRANGE":
            for _ in range(8):
                fake.kept.answer([b"XADD", words[1], b"*", NAME.pack(*name_of(next(numbers)))])
        return honest(words)

    first = make(fake)
    keep(first, 1)
    monkeypatch.setattr(
        fake.kept, "answer", lambda words: (flooded if words[0] == b"XRANGE" else honest)(words)
    )
    second = make(fake)
    wait(lambda: second.works)
    wait(lambda: next(numbers) > 1200)
    keep(second, 2)
    assert fetch(first, 1, 2) == [1, 2], "contents are read and written meanwhile"
    assert max(len(first), len(second)) <= 30 + 8
    monkeypatch.setattr(fake.kept, "answer", honest)
    keep(first, 3)
    wait(lambda: second.holds(name_of(3)))


def test_a_full_redis_takes_nothing_more_and_gives_what_it_has(make: Make, fake: FakeRedis) -> None:
    tier = make(fake)
    keep(tier, 1, 2)
    fake.kept.room = 2
    keep(tier, 3)
    assert (tier.works, tier.refused, tier.holds(name_of(3))) == (True, 1, False)
    assert fetch(tier, 1, 2, 3) == [1, 2]


@pytest.mark.redis
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
def test_its_maxmemory_is_kept(make: Make, tmp_path: Path, policy: str) -> None:
    with redis_server("real", tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", policy) as server:
        tier = make(server)
        keep(tier, *range(600))  # 3 MB of contents
        with contextlib.closing(look_into(server)) as found:
            assert found.info("memory")["used_memory"] < 4 * 2**20
        there = len(values_of(server))
        assert 50 < there < 590
        assert tier.works
        assert (tier.refused > 0) == (policy == "noeviction")
        came = len(fetch(tier, *range(600)))
        assert there - 60 < came <= there, "what readers are sent takes memory, too"
        assert tier.damaged == 0


def test_without_a_bound_it_is_not_used(make: Make, fake: FakeRedis, said: list[str]) -> None:
    fake.kept.maxmemory = 0
    tier = make(fake)
    wait(lambda: tier._outages.was_up)
    assert not tier.works
    wait(lambda: heard(said, "it has no maxmemory"))
    fake.kept.maxmemory = 2**20
    wait(lambda: tier.works)


@pytest.mark.parametrize("kind", BOTH)
def test_a_password_is_asked_for_and_never_shown(tmp_path: Path, kind: str, said: list[str]) -> None:
    with redis_server(kind, tmp_path, "--maxmemory", "64mb", "--requirepass", "right,one") as server:
        if isinstance(server, FakeRedis):
            server.password = b"right,one"
        path = server.url.removeprefix("unix://")
        for password, works in (("wrong-one", False), ("right%2Cone", True)):
            found = parse_tiers(f"remote=unix://:{password}@{path}")
            tier = RedisTier(found.redis, BLOCK, MARK)
            wait(lambda tier=tier, works=works: tier.works if works else tier._outages.was_up)  # type: ignore[misc]
            tier.close()
            assert password not in repr(found)
        (line,) = [each for each in said if "computed until" in each]
        assert "KV blocks in unix:/" in line
        assert not heard(said, "wrong-one")


def test_the_option_and_its_errors() -> None:
    found = parse_tiers(
        "ram=1MiB,remote=rediss://me:secret@[::1]:6380/2,ca=/etc/ca.pem,remote-key=/etc/kv.key"
    )
    assert (found.redis, found.remote, found.authority, found.remote_key) == (
        "rediss://me:secret@[::1]:6380/2", None, "/etc/ca.pem", "/etc/kv.key",
    )  # fmt: skip
    assert parse_tiers("remote=redis://host").redis == "redis://host"
    assert parse_tiers("remote=Redis://host").redis == "redis://host"
    for wrong, says in (
        ("redis://", "not the URL"),
        ("redis://me:secret@host:port", "not the URL"),
        ("redis://me:secret@host:6379/name", "not the URL"),
        ("redis://me:secret@host?socket_timeout=100", "not the URL"),
        ("unix://me:secret@host/socket", "not the URL"),
        ("redis://me:secret@host,ca=/etc/ca.pem", "ca: is for"),
        ("redis://me:secret@host,via=nixl", "via: is for"),
        ("redis://me:secret@host,role=prefill", "role needs remote=HOST"),
        ("redis://me:secret@host,remote=redis://me:secret@host", "there are two"),
        ("host:1:/key,remote=redis://me:secret@host", "there are two"),
        ("REDIS://me:secret@host/name", "not the URL"),
        ("redis://user:12,secret@host", "a part with an @"),
        ("redis://user:12,secret=x@host", "what is given for 'secret'"),
        ("host:1:/key,remot=redis://me:secret@host", "what is given for 'remot'"),
        ("host:1:/key,ram=secret@host", "what is given for 'ram'"),
        ("host:1:/key,disk=secret@host:/folder", "what is given for 'disk'"),
        ("host:1:/key,via=secret@host", "what is given for 'via'"),
        ("secret@host", "what is given for 'remote'"),
        ("host:1:/key,remote-key=/etc/kv.key", "remote-key is of"),
    ):
        with pytest.raises(ValueError, match=says) as raised:
            parse_tiers(f"remote={wrong}")
        assert "secret" not in str(raised.value).replace("what is given for 'secret'", "")
    with pytest.raises(ValueError, match="over the"):
        RedisTier("redis://host", 2**29, MARK)
    assert redis_bytes(2**20, sealed=True) > redis_bytes(2**20) > 2**26
