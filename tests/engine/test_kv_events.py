"""KV events in vLLM's format: what is on the wire, who can read it, and what is refused."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.kv_events import KvEventsConfig, parse_kv_events
from quire.config.serving import ServingConfig
from quire.core.cache_changes import CacheChange
from quire.core.tier import space_of
from quire.engine.cache_log import KEPT_BYTES, CacheLog, block_hash, event_bytes
from quire.engine.front.event_publisher import EventMaker, ZmqPublisher
from quire.engine.host.held import server_memory
from quire.types import QuireError


def digest(number: int) -> bytes:
    return bytes(8) + number.to_bytes(8, "big")


def tokens(*ids: int) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in ids)


def stored(number: int, parent: int, *ids: int, space: str = "") -> CacheChange:
    before = digest(parent) if parent else b""
    return CacheChange(digest(number), before, tokens(*ids), space or ("" if parent else space_of("", "")))


def decoded(maker: EventMaker, *changes: CacheChange) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(maker.events(changes, 2)))


def test_events_have_the_fields_of_vllm() -> None:
    """As they stand in a message of vLLM 0.26: maps with a type. Blocks that follow each other are one event."""
    first = {
        "type": "BlockStored", "block_hashes": [2**63 + 1, 2, 3], "parent_block_hash": None,
        "token_ids": [11, 12, 21, 22, 31, 32], "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    big = 2**63 + 1
    assert decoded(
        EventMaker(), stored(big, 0, 11, 12), stored(2, big, 21, 22), stored(3, 2, 31, 32), stored(4, big, 41, 42),
        CacheChange(digest(3)), CacheChange(digest(2)), stored(2, big, 21, 22),
    ) == [
        first,
        first | {"block_hashes": [4], "parent_block_hash": big, "token_ids": [41, 42]},
        {"type": "BlockRemoved", "block_hashes": [3, 2], "medium": "GPU"},
        first | {"block_hashes": [2], "parent_block_hash": big, "token_ids": [21, 22]},
    ]  # fmt: skip
    assert decoded(EventMaker()) == [{"type": "AllBlocksCleared"}]


def test_events_name_adapters_and_salts() -> None:
    maker = EventMaker({"1234": "sql"}.get)  # type: ignore[arg-type]
    (event,) = decoded(maker, stored(1, 0, 1, 1, space=space_of("1234", "s:1")), stored(2, 1, 2, 2))
    assert (event["lora_name"], event["extra_keys"]) == ("sql", [["s:1"], None])
    (event,) = decoded(maker, stored(3, 2, 3, 3))  # in a later batch
    assert event["lora_name"] == "sql"
    assert "extra_keys" not in event
    decoded(maker, *(CacheChange(digest(number)) for number in (3, 2, 1)))
    assert not maker._spaces
    (event,) = decoded(maker, stored(1, 0, 1, 1, space=space_of("", "salt")))
    assert (event["lora_name"], event["extra_keys"]) == (None, [["salt"]])
    (event,) = decoded(maker, stored(4, 0, 1, 1, space=space_of("5678", "")))
    assert event["lora_name"] == "5678"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "kv_events_config: not JSON"),
        ("[]", "kv_events_config: not a JSON object"),
        ('{"endpoints": ""}', "kv_events_config.endpoints: is not a field; there are enable_kv_cache_events"),
        ('{"publisher": "nats"}', "kv_events_config.publisher: 'nats' is not one of null, zmq"),
        ('{"hwm": 0}', "kv_events_config.hwm: 0 is not a positive integer"),
        ('{"topic": 1}', "kv_events_config.topic: 1 is not a text"),
        (
            '{"enable_kv_cache_events": 1}',
            "kv_events_config.enable_kv_cache_events: 1 is neither true nor false",
        ),
        (
            '{"endpoint": "udp://x:1"}',
            "kv_events_config.endpoint: 'udp://x:1' begins with none of tcp://, ipc://",
        ),
        ('{"endpoint": "tcp://x"}', "kv_events_config.endpoint: 'tcp://x' is not tcp://HOST:PORT"),
        ('{"endpoint": "tcp://indexer:5557"}', "endpoint: tcp://indexer:5557 is beyond this machine"),
        ('{"replay_endpoint": "tcp://10.0.0.1:5558"}', "replay_endpoint: tcp://10.0.0.1:5558 is beyond"),
    ],
)
def test_what_is_wrong_is_named(given: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("[", r"\[").split("'")[0]) as error:
        ServingConfig(kv_events_config=given)
    assert says in str(error.value)


def test_addresses_are_those_of_loopback_unless_more_is_asked_for() -> None:
    plain = parse_kv_events('{"enable_kv_cache_events": true}')
    assert plain.publishes
    assert plain.address(plain.endpoint, 0) == ("tcp://127.0.0.1:5557", True)
    assert plain.address("tcp://localhost:7000", 2) == ("tcp://localhost:7002", False)
    assert plain.address("ipc:///tmp/events", 1) == ("ipc:///tmp/events.1", True)
    for further in ({"allow_unencrypted": True}, {"curve_secret_key_file": "key"}):
        wide = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://indexer:5557", **further)  # type: ignore[arg-type]
        assert wide.address(wide.endpoint, 1) == ("tcp://indexer:5558", False)
        assert wide.address("tcp://*:5557", 0) == ("tcp://*:5557", True)
    assert not parse_kv_events({"publisher": "zmq"}).publishes
    assert not parse_kv_events({"enable_kv_cache_events": True, "publisher": "null"}).publishes


def test_the_memory_of_events_is_planned() -> None:
    without = server_memory(ServingConfig())
    plain = server_memory(
        ServingConfig(kv_events_config={"enable_kv_cache_events": True, "publisher": "null"})
    )
    published = server_memory(ServingConfig(kv_events_config={"enable_kv_cache_events": True}))
    assert "kv_events" not in without
    assert plain["kv_events"] == event_bytes(publishes=False) < published["kv_events"]


def receive(socket: Any, most: float = 20.0) -> list[bytes]:
    assert socket.poll(most * 1000), "nothing came"
    found: list[bytes] = socket.recv_multipart()
    return found


async def served(read: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(read)


def test_batches_are_published_and_sent_again() -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq, which is optional")

    async def follow() -> None:
        context = zmq.Context()
        try:
            await follow_with(context)
        finally:
            context.destroy(linger=0)  # else it waits for its sockets, for ever, when it is collected

    async def follow_with(context: Any) -> None:
        sub, asks = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        sub.subscribe(b"kv@")
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports = [sub.bind_to_random_port("tcp://127.0.0.1"), free.getsockname()[1]]
        config = KvEventsConfig(
            enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{ports[0]}", topic="kv@pod@model",
            replay_endpoint=f"tcp://*:{ports[1]}", buffer_steps=8,
        )  # fmt: skip
        log = CacheLog(0, ZmqPublisher(config, 0, EventMaker()))
        log.block_size = 2
        asks.connect(f"tcp://127.0.0.1:{ports[1]}")
        log.began(b"")
        number = 0
        while not sub.poll(
            50
        ):  # the first ones are lost until the connection is there, as with any PUB socket
            number += 1
            log.changed([stored(number, 0, number, number)])
        topic, seq, payload = await served(lambda: receive(sub))
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert (topic, rank) == (b"kv@pod@model", 0)
        assert abs(ts - time.time()) < 60
        assert events[0]["block_hashes"] == [int.from_bytes(seq, "big")]
        for _ in range(20):
            number += 1
            log.changed([stored(number, 0, number, number)])
        asks.send_multipart([b"", (number - 2).to_bytes(8, "big")])
        again = [await served(lambda: receive(asks)) for _ in range(4)]
        assert [int.from_bytes(seq, "big", signed=True) for _, seq, _ in again] == [
            number - 2,
            number - 1,
            number,
            -1,
        ]
        assert msgspec.msgpack.decode(again[2][2])[1][0]["block_hashes"] == [number]
        asks.send_multipart([b"", bytes(8)])  # from the first on: those that are still kept
        kept = [await served(lambda: receive(asks)) for _ in range(9)]
        assert int.from_bytes(kept[0][1], "big") == number - 7
        asks.send_multipart([b"", b"what?"])
        asks.send_multipart([b"", (number + 1).to_bytes(8, "big")])
        assert (await served(lambda: receive(asks)))[1:] == [b"\xff" * 8, b""]
        log.close()

    asyncio.run(follow())


def test_batches_that_are_kept_have_a_bound(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq, which is optional")

    async def publish() -> None:
        config = KvEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{tmp_path}/events",
            replay_endpoint=f"ipc://{tmp_path}/replay",
        )
        publisher = ZmqPublisher(config, 7, EventMaker())
        try:
            large = [stored(number, number - 1, *range(2048)) for number in range(1, 200)]
            for number in range(40):
                publisher.publish(number, large, 2048)
            assert 0 < sum(len(payload) for _, payload in publisher._kept) == publisher._bytes <= KEPT_BYTES
        finally:
            publisher.close()

    asyncio.run(publish())


def test_an_address_that_cannot_be_bound_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq, which is optional")
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/none/events")
    with pytest.raises(QuireError, match="kv_events_config: No such file"):
        ZmqPublisher(config, 0, EventMaker())


def test_who_has_not_the_key_reads_nothing(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="needs pyzmq, which is optional")
    public, secret = zmq.curve_keypair()
    (tmp_path / "key").write_bytes(secret + b"\n")
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events",
        curve_secret_key_file=str(tmp_path / "key"),
    )  # fmt: skip

    async def publish() -> None:
        publisher = ZmqPublisher(config, 0, EventMaker())
        context = zmq.Context()
        plain, curve = context.socket(zmq.SUB), context.socket(zmq.SUB)
        curve.curve_serverkey = public
        curve.curve_publickey, curve.curve_secretkey = zmq.curve_keypair()
        for each in (plain, curve):
            each.subscribe(b"")
            each.connect(config.endpoint)
        number = 0
        while not curve.poll(20):
            publisher.publish(number, [stored(1, 0, 1, 1)], 2)
            number += 1
        assert not plain.poll(200)
        publisher.close()
        context.destroy(linger=0)

    asyncio.run(publish())


def test_hashes_are_the_last_bytes_of_digests() -> None:
    assert block_hash(bytes(range(16))) == int.from_bytes(bytes(range(8, 16)), "big")
    assert json.loads('{"n": 18446744073709551615}')["n"] == block_hash(b"\xff" * 16)
