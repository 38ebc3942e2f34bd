"""Limits that several processes count together in Redis: as if there were one, and what they do while it is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import until
from helpers.redis_servers import DAY, FakeRedis, RealRedis, ScriptedCounts, redis_server
from helpers.server import ENDLESS, GUARD, PATIENT, serving
from quire.config.serving import ServingConfig
from quire.config.tenants import SharedCounts, Tenant, TenantsFileError, key_digest, parse_tenants
from quire.server.rate_limits import NANO, Refusal, TenantLimits, TokenCharge
from quire.server.shared_limits import SharedLimits
from quire.server.tenant_access import TenantDirectory

pytest.importorskip("redis", reason="needs redis-py, which is optional")

BOTH = [pytest.param("fake", id="fake"), pytest.param("real", id="real", marks=pytest.mark.redis)]


@pytest.fixture(params=BOTH)
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeRedis | RealRedis]:
    with redis_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRedis]:
    with redis_server("fake", tmp_path) as server:
        assert isinstance(server, FakeRedis)
        yield server


class Counting:
    """What one process has of a tenant's limits."""

    def __init__(
        self, url: str, tenant: Tenant, instances: int = 2, timeout: float = GUARD, place: str = "server"
    ) -> None:
        options = SharedCounts(redis=url, instances=instances, timeout=timeout)
        self.tenant, self.shared = tenant, SharedLimits(options, Path(), place, time.monotonic_ns)
        part = self.shared.part
        self.own = TenantLimits(
            part(tenant.requests_per_minute), part(tenant.tokens_per_minute), part(tenant.concurrent_requests),
            part(tenant.tokens_per_day), time.monotonic_ns() + 3600 * NANO,
        )  # fmt: skip

    async def enter(self) -> str | Refusal:
        """The name of a request that was admitted."""
        made = await self.shared.enter(self.tenant, self.own)
        return made if isinstance(made, Refusal) else made[0]

    async def charge(self, tokens: int, *, background: bool = False) -> TokenCharge | Refusal:
        made = await self.shared.charge(self.tenant, self.own, tokens, background=background)
        return made if isinstance(made, Refusal) else made[0]

    async def admitted(self, requests: int) -> int:
        """How many of so many requests are admitted."""
        return sum([isinstance(await self.enter(), str) for _ in range(requests)])


def run(work: Coroutine[Any, Any, None], *processes: Counting) -> None:
    """Run a test, then end the processes."""

    async def all_of_it() -> None:
        try:
            await work
        finally:
            for each in processes:
                await each.shared.stop()

    asyncio.run(all_of_it())


async def eventually(condition: Any) -> None:
    for _ in range(int(GUARD * 100)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def told(process: Counting) -> None:
    """Until Redis knows what it was told."""
    await eventually(lambda: not process.shared._late)


def test_a_limit_of_requests_holds_over_all_processes(redis: FakeRedis | RealRedis) -> None:
    """However their requests interleave; a tenant of another name, and another place, have their own counts."""
    ann = Tenant(name="ann", requests_per_minute=30)
    three = [Counting(redis.url, ann, 3) for _ in range(3)]
    bob = Counting(redis.url, Tenant(name="bob", requests_per_minute=5))
    routers = Counting(redis.url, ann, place="router")

    async def work() -> None:
        counts = await asyncio.gather(*(each.admitted(25) for each in three))
        assert sum(counts) == 30
        refusal = await three[0].enter()
        assert isinstance(refusal, Refusal)
        assert refusal.limit == "requests_per_minute"
        assert refusal.wait is not None
        assert 0 < refusal.wait <= 60 * NANO
        assert await bob.admitted(6) == 5
        assert await routers.admitted(31) == 30

    run(work(), *three, bob, routers)


def test_apart_they_admit_as_often_as_there_are_processes(redis: FakeRedis | RealRedis) -> None:
    """What the counts in Redis are for: without them two processes admit twice the limit."""
    limits = [TenantLimits(10) for _ in range(2)]
    assert sum(one.enter(time.monotonic_ns()) is None for one in limits for _ in range(15)) == 20
    ann = Tenant(name="ann", requests_per_minute=10)
    two = [Counting(redis.url, ann) for _ in range(2)]

    async def work() -> None:
        assert sum([await each.admitted(15) for each in two]) == 10

    run(work(), *two)


def test_requests_at_once_and_the_end_of_one_elsewhere(redis: FakeRedis | RealRedis) -> None:
    one, two = (Counting(redis.url, Tenant(name="ann", concurrent_requests=2)) for _ in range(2))

    async def work() -> None:
        first = await one.enter()
        assert isinstance(first, str)
        assert isinstance(await two.enter(), str)
        for each in (one, two):
            refusal = await each.enter()
            assert isinstance(refusal, Refusal)
            assert (refusal.limit, refusal.wait) == ("concurrent_requests", NANO)
            assert refusal.message == "2 requests of this tenant run, its limit is 2"
        one.shared.leave(first, one.own)
        await told(one)
        assert isinstance(await two.enter(), str)
        assert isinstance(await one.enter(), Refusal)

    run(work(), one, two)


def test_tokens_are_settled_for_all(redis: FakeRedis | RealRedis) -> None:
    """Of the minute and of the day; lines of batches have the day alone."""
    one, two = (
        Counting(redis.url, Tenant(name="a", tokens_per_minute=100, tokens_per_day=1000)) for _ in range(2)
    )

    async def work() -> None:
        charge = await one.charge(80)
        assert isinstance(charge, TokenCharge)
        refusal = await two.charge(30)
        assert isinstance(refusal, Refusal)
        assert refusal.limit == "tokens_per_minute"
        assert refusal.message.endswith("20 of 100 are left of this minute's")
        one.shared.settle(one.tenant, one.own, charge, 20)
        await told(one)
        assert isinstance(await two.charge(80), TokenCharge)  # 100 of the minute and of the day
        assert isinstance(await two.charge(800, background=True), TokenCharge)
        refusal = await one.charge(101, background=True)
        assert isinstance(refusal, Refusal)
        assert refusal.limit == "tokens_per_day"
        assert refusal.message.endswith("100 of 1000 are left of the day's quota")
        never = await one.charge(101)
        assert isinstance(never, Refusal)
        assert never.wait is None

    run(work(), one, two)


def test_while_redis_is_away_each_has_its_part(
    redis: FakeRedis | RealRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """What was admitted alone counts once Redis is back, though it has forgotten all else, or has not."""
    one, two = (Counting(redis.url, Tenant(name="ann", requests_per_minute=10)) for _ in range(2))

    async def work() -> None:
        assert await one.admitted(2) == 2
        await asyncio.to_thread(redis.stop)
        # one has counted its two as its own; two has its whole part: together no more than the limit
        assert [await one.admitted(20), await two.admitted(20)] == [3, 5]
        assert not one.shared.up
        assert "Redis is away, each limit is 1/2 here" in caplog.text
        await asyncio.to_thread(redis.start)
        await eventually(lambda: one.shared.up and two.shared.up)
        left = 0 if isinstance(redis, FakeRedis) else 2  # the real one has lost what it knew
        assert await two.admitted(20) + await one.admitted(20) == left

    run(work(), one, two)


def test_a_redis_that_does_not_answer_holds_nobody_up(fake: FakeRedis) -> None:
    """One request waits for it, up to the timeout; the next ones do not."""
    fake.stalled = True
    one = Counting(fake.url, Tenant(name="ann", requests_per_minute=10), timeout=0.05)

    async def work() -> None:
        assert await asyncio.wait_for(one.admitted(9), GUARD) == 5
        assert one.shared.alone == 9
        fake.stalled = False
        await eventually(lambda: one.shared.up)
        assert await one.admitted(9) == 5

    run(work(), one)


def test_what_ends_while_redis_is_away_has_ended_when_it_is_back(fake: FakeRedis) -> None:
    one, two = (
        Counting(fake.url, Tenant(name="ann", concurrent_requests=2, tokens_per_minute=100)) for _ in range(2)
    )

    async def work() -> None:
        first, charge = await one.enter(), await one.charge(100)
        assert isinstance(first, str)
        assert isinstance(charge, TokenCharge)
        assert isinstance(await two.enter(), str)
        await asyncio.to_thread(fake.stop)
        assert isinstance(await one.enter(), Refusal)  # its part is 1, which runs
        one.shared.leave(first, one.own)
        one.shared.settle(one.tenant, one.own, charge, 40)
        await asyncio.to_thread(fake.start)
        await told(one)
        await eventually(lambda: one.shared.up)
        assert isinstance(await one.enter(), str)
        assert isinstance(await two.enter(), Refusal)
        await eventually(lambda: two.shared.up)  # which has noticed only now
        assert isinstance(await two.charge(60), TokenCharge)

    run(work(), one, two)


def test_a_request_larger_than_the_part_comes_later(fake: FakeRedis) -> None:
    """It has room in the limit, so it is not told that it never will."""
    fake.stop()
    one = Counting(fake.url, Tenant(name="ann", tokens_per_minute=100))

    async def work() -> None:
        refusal = await one.charge(60)
        assert isinstance(refusal, Refusal)
        assert refusal.wait == NANO

    run(work(), one)


def test_requests_of_a_process_that_died_end(fake: FakeRedis) -> None:
    """After half a minute in which it said nothing of them; those of others go on."""
    ann = Tenant(name="ann", concurrent_requests=2)
    dead, alive = (Counting(fake.url, ann) for _ in range(2))

    async def work() -> None:
        assert isinstance(await dead.enter(), str)
        assert isinstance(await alive.enter(), str)
        assert isinstance(await alive.enter(), Refusal)
        fake.counts.ahead = 15 * 10**6
        alive.shared._renewed = 0  # as after ten seconds
        alive.shared._wake.set()
        await eventually(lambda: alive.shared._renewed)
        assert isinstance(await alive.enter(), Refusal)
        fake.counts.ahead = 31 * 10**6
        assert isinstance(await alive.enter(), str)
        assert isinstance(await alive.enter(), Refusal)

    run(work(), dead, alive)


def test_days_begin_anew_at_midnight(fake: FakeRedis) -> None:
    one = Counting(fake.url, Tenant(name="ann", tokens_per_day=100))

    async def work() -> None:
        fake.counts.ahead = DAY - time.time_ns() // 1000 % DAY - 3600 * 10**6  # an hour before midnight
        old = await one.charge(100)
        assert isinstance(old, TokenCharge)
        refusal = await one.charge(1)
        assert isinstance(refusal, Refusal)
        assert refusal.wait is not None
        assert 0 < refusal.wait <= 3600 * NANO
        fake.counts.ahead += 3600 * 10**6
        assert isinstance(await one.charge(100), TokenCharge)
        one.shared.settle(one.tenant, one.own, old, 0)  # that of yesterday gives nothing back today
        await told(one)
        assert isinstance(await one.charge(1), Refusal)

    run(work(), one)


def counted(fake: FakeRedis, *windows: str) -> list[int]:
    """What Redis has in these windows of ann."""
    keys = [[f"quire:server:{{ann}}:{name}:ends", ""] for name in windows]
    return [fake.counts.run(pair, ["change", "-", "window", "-1", "0", "1"])[3] for pair in keys]


def watch(fake: FakeRedis, monkeypatch: pytest.MonkeyPatch, *, marks: bool = True) -> Counter[str]:
    """Counts what the script is asked from now on. Without `marks` it does not look whether something was done."""
    run, asked = fake.counts.run, Counter[str]()

    def watched(keys: list[str], values: list[str]) -> list[int]:
        asked[values[0]] += 1
        pairs = len(keys) // 2
        return run(keys, values) if marks else run(keys[: 2 * pairs], values[: 2 + 4 * pairs])

    monkeypatch.setattr(fake.counts, "run", watched)
    return asked


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is looked for, and told what runs, all the time."""
    monkeypatch.setattr("quire.server.shared_limits._BEAT", 0.001)
    monkeypatch.setattr("quire.server.shared_limits._RENEWAL", 0)


@pytest.mark.parametrize("turns", range(6))
def test_it_ends_however_soon_after_a_change(fake: FakeRedis, turns: int) -> None:
    """At each turn of the loop after something has woken the task that tells Redis."""
    one = Counting(fake.url, Tenant(name="ann", concurrent_requests=2))

    async def work() -> None:
        first = await one.enter()
        assert isinstance(first, str)
        await told(one)
        await asyncio.sleep(0.05)  # it waits to be woken
        one.shared.leave(first, one.own)
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(GUARD / 10):
            await one.shared.stop()

    asyncio.run(work())


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("marks", [True, False])
def test_a_change_whose_answer_is_lost_counts_once(
    fake: FakeRedis, monkeypatch: pytest.MonkeyPatch, marks: bool
) -> None:
    """And as often as it is sent, if the script does not mark what it has done. So does what a day is told later."""
    one = Counting(fake.url, Tenant(name="ann", tokens_per_minute=1000, tokens_per_day=1000), instances=1)

    async def work() -> None:
        charge = await one.charge(900)
        assert isinstance(charge, TokenCharge)
        asked = watch(fake, monkeypatch, marks=marks)
        fake.mute = True
        one.shared.settle(one.tenant, one.own, charge, 800)
        for sent in range(1, 4):
            await eventually(lambda sent=sent: asked["change"] >= 2 * sent)
            await asyncio.to_thread(fake.stop)
            await asyncio.to_thread(fake.start)
        await eventually(lambda: asked["change"] >= 8)
        await asyncio.to_thread(fake.stop)
        await eventually(lambda: not one.shared.up)
        assert isinstance(await one.charge(50), TokenCharge)
        await asyncio.to_thread(fake.start)
        for sent in range(1, 3):
            await eventually(lambda sent=sent: asked["put"] >= 2 * sent)
            await asyncio.to_thread(fake.stop)
            await asyncio.to_thread(fake.start)
        fake.mute = False
        await asyncio.to_thread(fake.stop)  # what is not answered yet never is
        await asyncio.to_thread(fake.start)
        await told(one)
        tokens, day = counted(fake, "tokens", "day")
        assert (tokens == 850) == marks
        assert (day == 850) == marks

    run(work(), one)


def test_a_stop_waits_for_what_is_on_its_way(fake: FakeRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would send the same changes, and drop more than they sent."""
    one = Counting(fake.url, Tenant(name="ann", tokens_per_day=1000))
    send, sending, most = one.shared._send, 0, 0

    async def watched(some: Any) -> None:
        nonlocal sending, most
        sending += 1
        most = max(most, sending)
        try:
            await send(some)
        finally:
            sending -= 1

    async def work() -> None:
        charge = await one.charge(900)
        assert isinstance(charge, TokenCharge)
        asked = watch(fake, monkeypatch)
        monkeypatch.setattr(one.shared, "_send", watched)
        fake.mute = True
        one.shared.settle(one.tenant, one.own, charge, 800)
        await eventually(lambda: asked["change"])
        fake.mute = False
        await one.shared.stop()
        assert (most, asked["change"]) == (1, 2)  # it was sent again
        assert counted(fake, "day") == [800]
        assert not one.shared._late

    run(work(), one)


@pytest.mark.usefixtures("brisk")
def test_an_outage_holds_what_was_admitted_and_no_more(
    fake: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is, and however many run; these are renewed when Redis is back."""
    monkeypatch.setattr("quire.server.shared_limits._BEAT", 0.05)
    ann = Tenant(name="ann", concurrent_requests=80, tokens_per_day=1000)
    one, other = Counting(fake.url, ann, instances=1), Counting(fake.url, ann)
    gone, beats = one.shared._gone, 0

    def watched(error: BaseException) -> None:
        nonlocal beats
        beats += 1
        gone(error)

    async def work() -> None:
        assert await one.admitted(78) == 78  # more than are sent at once
        await asyncio.to_thread(fake.stop)
        await eventually(lambda: not one.shared.up)
        monkeypatch.setattr(one.shared, "_gone", watched)
        assert [await one.admitted(1), isinstance(await one.charge(100), TokenCharge)] == [1, True]
        await eventually(lambda: beats >= 10)
        assert len(one.shared._late) == 2
        fake.counts.ahead = 40 * 10**6  # Redis believes that they have ended
        await asyncio.to_thread(fake.start)
        await eventually(lambda: one.shared.up)
        assert counted(fake, "running", "day") == [79, 100]
        assert await other.admitted(3) == 1
        assert one.shared.lost == 0

    run(work(), one, other)


def test_changes_that_are_too_many_are_counted_and_logged(
    fake: FakeRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest are lost. One outage has one line about it, and the number when it has ended."""
    monkeypatch.setattr("quire.server.shared_limits._MOST_LATE", 5)
    monkeypatch.setattr("quire.server.shared_limits._BEAT", 0.001)
    caplog.set_level("INFO", "quire.server")
    one = Counting(fake.url, Tenant(name="ann", tokens_per_day=1000), instances=1)

    async def work() -> None:
        assert isinstance(await one.charge(1), TokenCharge)
        await asyncio.to_thread(fake.stop)
        for tokens in range(10, 80, 10):
            assert isinstance(await one.charge(tokens), TokenCharge)
        assert (one.shared.lost, len(one.shared._late)) == (2, 5)
        assert caplog.text.count("5 changes wait for Redis: the oldest are lost") == 1
        await asyncio.to_thread(fake.start)
        await eventually(lambda: one.shared.up)
        assert "Redis is back; changes that it is not told: 2" in caplog.text
        assert counted(fake, "day") == [1 + 30 + 40 + 50 + 60 + 70]

    run(work(), one)


@pytest.mark.usefixtures("brisk")
def test_a_refused_request_that_redis_counted_is_taken_back(
    fake: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted, the answer was lost, and this process had no room in its part."""
    ann = Tenant(name="ann", concurrent_requests=2, requests_per_minute=100, tokens_per_minute=100)
    one, other = Counting(fake.url, ann), Counting(fake.url, ann)

    async def lost(asking: Coroutine[Any, Any, Any], asked: Counter[str]) -> Any:
        fake.mute, before = True, asked["take"]
        task = asyncio.create_task(asking)
        await eventually(lambda: asked["take"] > before)
        await asyncio.to_thread(fake.stop)
        fake.mute = False
        found = await task
        await asyncio.to_thread(fake.start)
        await eventually(lambda: one.shared.up)
        return found

    async def work() -> None:
        asked = watch(fake, monkeypatch)
        assert isinstance(await one.enter(), str)
        assert isinstance(await lost(one.enter(), asked), Refusal)
        assert isinstance(await lost(one.charge(60), asked), Refusal)
        await told(one)
        assert counted(fake, "running", "requests", "tokens") == [1, 1, 0]
        assert isinstance(await other.enter(), str)

    run(work(), one, other)


@pytest.mark.redis
def test_the_script_counts_as_the_plain_words_do(tmp_path: Path) -> None:
    """Random histories of two tenants, with lengths that end at once or not at all, have equal answers."""
    from redis import Redis

    rng, plain = random.Random(25), ScriptedCounts()
    script = (Path(__file__).parents[2] / "src/quire/server/shared_counts.lua").read_text()
    with redis_server("real", tmp_path) as server, Redis.from_url(server.url) as client:
        real = client.register_script(script)
        admitted = refused = twice = 0
        sent, lowest = dict.fromkeys("ab", 0), dict.fromkeys("ab", 1)  # numbers of what may be sent twice
        for _ in range(3000):
            tenant, what = rng.choice("ab"), rng.choice(["take"] * 6 + ["put", "change", "change"])
            names = rng.sample(["running", "tokens", "day"], rng.randint(1, 3))
            member = f"m{rng.randint(1, 40)}"
            if what == "change" and "day" in names:
                member = rng.choice(["", str(time.time_ns() // 1000 // DAY), "7"])
            keys, values = [], [what, member]
            for name in names:
                keys += [f"{{{tenant}}}:{name}:ends", f"{{{tenant}}}:{name}:amounts"]
                amount = rng.randint(-9 if what == "change" else 1, 30)
                limit, length = rng.choice([-1, 100, 300]), rng.choice([1, 3600 * 10**6])
                values += ["day" if name == "day" else "window", str(limit), str(amount), str(length)]
            if what != "take" and rng.random() < 0.8:
                if sent[tenant] and rng.random() < 0.3:
                    number, oldest, twice = rng.randint(1, sent[tenant]), 1, twice + 1
                else:
                    number = sent[tenant] = sent[tenant] + 1
                    oldest = lowest[tenant] = rng.randint(lowest[tenant], number)
                keys.append(f"{{{tenant}}}:done")
                values += [str(number), str(oldest)]
            expected, found = plain.run(keys, values), real(keys, values)
            assert [found[0], found[2], *found[3::2]] == [expected[0], expected[2], *expected[3::2]], (
                keys,
                values,
            )
            assert abs(found[1] - expected[1]) < GUARD * 10**6
            admitted, refused = admitted + (what == "take" and not found[0]), refused + bool(found[0])
        assert min(admitted, refused, twice) > 200
        assert all(client.zcard(f"{{{tenant}}}:done") <= 2 + sent[tenant] - lowest[tenant] for tenant in "ab")


WRONG = [
    ("redis = 'redis://:secret@host/0'\ninstances = 2", "has a password: put it into a file"),
    ("redis = 'redis://host?password=secret'\ninstances = 2", "has a password: put it into a file"),
    ("redis = 'http://host'\ninstances = 2", "must be an address such as redis://host:6379/0"),
    ("redis = 'redis://host'", "instances is missing"),
    ("redis = 'redis://host'\ninstances = 0", "must be an integer above 0"),
    ("redis = 'redis://host'\ninstances = 2\ntimeout = 0", "is not in [0.001, 60]"),
    ("redis = 'redis://host'\ninstances = 2\nwhat = 1", "unknown"),
]


@pytest.mark.parametrize(("lines", "message"), WRONG)
def test_what_is_wrong_is_named_without_a_password(lines: str, message: str) -> None:
    with pytest.raises(TenantsFileError) as error:
        parse_tenants(f"[shared]\n{lines}\n[tenants.a]\n")
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_only_the_number_of_processes_changes_while_it_runs(tmp_path: Path, fake: FakeRedis) -> None:
    path = tmp_path / "tenants.toml"

    def write(**more: object) -> None:
        lines = {"redis": fake.url, "instances": 2} | more
        shared = "\n".join(f"{name} = {value!r}" for name, value in lines.items())
        path.write_text(f"[shared]\n{shared}\n[tenants.a]\nrequests_per_minute = 12\n")

    write()
    directory = TenantDirectory(ServingConfig(tenants=str(path)))
    assert directory._limits["a"].requests.limit == 6
    write(instances=4)
    directory.reload()
    assert directory._limits["a"].requests.limit == 3
    for wrong in ({"prefix": "other"}, {"redis": "redis://elsewhere"}):
        write(**wrong)
        with pytest.raises(TenantsFileError, match="only instances change without a restart"):
            directory.reload()
    path.write_text("counts = 'counts.json'\n[shared]\nredis = 'redis://host'\ninstances = 2\n[tenants.a]\n")
    with pytest.raises(TenantsFileError, match="leave it out: with \\[shared\\] counts are in Redis"):
        directory.reload()
    write(password_file="missing")
    with pytest.raises(TenantsFileError, match="password_file: cannot be read"):
        TenantDirectory(ServingConfig(tenants=str(path)))


def test_servers_share_the_tokens_of_a_tenant(folder: Path, fake: FakeRedis, tmp_path: Path) -> None:
    """What a server has charged and settled is in Redis, and a request has what is left in its headers."""
    key, path = "qk-ann-012345678901234567890123", tmp_path / "tenants.toml"
    path.write_text(
        f"[shared]\nredis = '{fake.url}'\ninstances = 2\ntimeout = 60\n[tenants.ann]\n"
        f"keys = ['sha256:{key_digest(key).hex()}']\ntokens_per_minute = 1000\nrequests_per_minute = 5\n"
    )
    with serving(folder, ENDLESS, tenants=str(path), served_model_name=("tiny",), **PATIENT) as server:
        server.headers = {"authorization": f"Bearer {key}"}
        reply = server.complete("abc", max_tokens=4)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-limit-tokens"] == "1000"
        assert reply.headers["x-ratelimit-remaining-requests"] == "4"
        used = reply.json["usage"]["total_tokens"]
        key = "quire:server:{ann}:tokens:ends"
        until(lambda: fake.counts.run([key, ""], ["change", "-", "window", "-1", "0", "1"])[3] == used)
        server.complete("abc", max_tokens=1001).error(400, "over_rate_limit")
        assert server.metric("quire_shared_limits_up") == 1
