"""The tiers of an engine: the cache survives its process, with the bits of no cache at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.process import until
from helpers.redis_servers import redis_server
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire._native import supported_isas
from quire.config.kv_tiers import KvTiers, parse_tiers
from quire.config.schema import EngineConfig
from quire.worker.block_tiers import BlockTiers
from quire.worker.kv_file import KvFileError
from quire.worker.kv_server import BlockShelf, KvServer

LENGTH = 128
PROMPTS = [[3 + (7 * i + 3 * j) % 90 for j in range(100)] for i in range(6)]
ASKED = [
    SamplingParams(max_tokens=20, temperature=0.8, seed=seed, logprobs=1, ignore_eos=True)
    for seed in range(6)
]


@pytest.fixture(autouse=True)
def fetching_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is: blocks that take longer to read than to compute are computed."""
    monkeypatch.setattr(BlockTiers, "copy_seconds", lambda *_: 0.0)


def answers(folder: Any, *, times: int = 1, **options: Any) -> tuple[list[Any], int, Any]:
    """Tokens and log-probabilities, prompt tokens that were cached, and the tiers."""
    llm = LLM(folder, max_model_len=LENGTH, num_kv_blocks=28, threads=1, progress=False, **options)
    try:
        made, cached, tiers = [], 0, llm._built.core.tiers
        kept = [] if tiers is None else tiers.kept
        until(lambda: all(each.works for each in kept))  # connected
        for _ in range(times):
            until(lambda: not any(each.writes for each in kept))
            for output in llm.generate(PROMPTS, ASKED):
                cached += output.usage.cached_tokens
                for sample in output.outputs:
                    scores = [c.logprob for p in sample.logprobs or [] for c in p]
                    made.append((sample.token_ids, scores))
        return made, cached, tiers
    finally:
        llm.close()


@pytest.mark.parametrize("model", ["qwen3", "gemma2", "deepseek2-lite"])
def test_a_second_process_goes_on_with_what_the_first_has_computed(
    checkpoint: Folder, tmp_path: Path, model: str
) -> None:
    folder, tier = checkpoint(model), f"disk=4MiB:{tmp_path}"
    plain, none, _ = answers(folder, enable_prefix_caching=False)
    first, _, tiers = answers(folder, kv_tiers=tier)
    assert none == 0
    assert tiers.kept[0].blocks_out > 20
    second, cached, tiers = answers(folder, kv_tiers=tier)
    assert cached >= 96, "not all: reading a block may cost more than to compute it with so small a model"
    assert tiers.kept[0].blocks_in >= 6
    assert first == second == plain


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[str]:
    """A server of blocks, as a tier."""
    key = b"0123456789abcdef"
    (tmp_path / "key").write_bytes(key)
    server = KvServer(BlockShelf(2**24), key, socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=server.run).start()
    yield f"remote=127.0.0.1:{server._listener.getsockname()[1]}:{tmp_path / 'key'}"
    server.close()


@pytest.mark.parametrize("tiers", ["{shared}", "disk=4MiB:{folder},{shared}", "ram=1MiB,{shared}"])
def test_engines_share_a_server_of_blocks(
    checkpoint: Folder, tmp_path: Path, shared: str, tiers: str
) -> None:
    folder = checkpoint("qwen3")
    plain, _, _ = answers(folder, times=2, enable_prefix_caching=False)
    for number in range(2):
        given = tiers.format(shared=shared, folder=tmp_path / str(number))
        made, cached, found = answers(folder, times=2, kv_tiers=given)
        assert made == plain
        assert cached > 96
    assert found.kept[-1].kind == "remote"
    assert found.kept[-1].blocks_in > 0
    assert found.kept[-1].damaged == 0


def test_an_encrypted_disk_gives_the_same_answers(checkpoint: Folder, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the key of this very file\n")
    folder, tier = checkpoint("qwen3"), f"disk=4MiB:{tmp_path / 'kv'},disk-key={tmp_path / 'key'}"
    plain, _, _ = answers(folder, enable_prefix_caching=False)
    first, _, _ = answers(folder, kv_tiers=tier)
    second, cached, tiers = answers(folder, kv_tiers=tier)
    assert cached >= 96
    assert tiers.kept[0].blocks_in >= 6
    assert first == second == plain
    (tmp_path / "key").write_text("another key, by which nothing is found\n")
    third, cached, tiers = answers(folder, kv_tiers=tier)
    assert (third, cached, tiers.kept[0].damaged) == (plain, 0, 0)
    with pytest.raises(ValueError, match=r"kv_tiers: disk-key: .*No such file"):
        answers(folder, kv_tiers=f"disk=4MiB:{tmp_path / 'kv'},disk-key={tmp_path / 'none'}")


@pytest.mark.parametrize("further", ["", ",remote-key={}/key"], ids=["plain", "encrypted"])
def test_what_is_in_a_redis_gives_the_same_answers(checkpoint: Folder, tmp_path: Path, further: str) -> None:
    pytest.importorskip("redis", reason="needs redis-py, which is optional")
    (tmp_path / "key").write_text("the key of these very engines\n")
    folder = checkpoint("qwen3")
    plain, _, _ = answers(folder, enable_prefix_caching=False)
    with redis_server("fake", tmp_path) as server:
        tier = f"ram=1MiB,remote={server.url}{further.format(tmp_path)}"
        first, _, tiers = answers(folder, kv_tiers=tier)
        assert tiers.kept[0].blocks_out >= 30
        second, cached, tiers = answers(folder, times=2, kv_tiers=tier)
        assert cached >= 96
        assert tiers.kept[0].blocks_in >= 6
        assert tiers.counts()["remote"]["damaged"] == 0
        assert first == plain
        assert second == plain + plain
    with pytest.raises(ValueError, match=r"kv_tiers: remote-key: .*No such file"):
        answers(folder, kv_tiers=f"remote={server.url},remote-key={tmp_path / 'none'}")


@pytest.mark.parametrize("tier", ["disk=4MiB:{}", "ram=1MiB, disk=4MiB:{}"])
def test_blocks_that_gave_way_come_back_from_either_tier(
    checkpoint: Folder, tmp_path: Path, tier: str
) -> None:
    """Six prompts of seven blocks in a pool of 28, twice."""
    folder = checkpoint("qwen3")
    plain, _, _ = answers(folder, times=2, enable_prefix_caching=False)
    made, cached, tiers = answers(folder, times=2, kv_tiers=tier.format(tmp_path))
    assert made == plain
    assert cached > 300
    assert tiers.kept[0].blocks_in + (tiers.ram.blocks_in if tiers.ram else 0) > 10
    if tiers.ram:
        assert tiers.ram.blocks_in > 0


def test_other_weights_formats_block_sizes_and_instructions_find_nothing(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, isas = f"disk=4MiB:{tmp_path}", supported_isas()
    answers(checkpoint("qwen3"), kv_tiers=tier)
    others: list[tuple[str, dict[str, Any], str]] = [
        ("llama2", {}, isas[0]),
        ("qwen3", {"kv_cache_dtype": "int8"}, isas[0]),
        ("qwen3", {"quantization": "int8"}, isas[0]),
        ("qwen3", {"block_size": 32}, isas[0]),
        *(("qwen3", {}, isa) for isa in isas[1:]),
    ]
    for name, options, isa in others:
        monkeypatch.setenv("QUIRE_ISA", isa)
        _, cached, tiers = answers(checkpoint(name), kv_tiers=tier, **options)
        assert cached == 0
        assert tiers.kept[0].blocks_in == 0


def test_it_is_in_the_memory_plan_and_has_its_limits(checkpoint: Folder, tmp_path: Path) -> None:
    folder = checkpoint("qwen3")
    llm = LLM(folder, max_model_len=LENGTH, kv_tiers=f"ram=1MiB,disk=64MiB:{tmp_path}", progress=False)
    parts = llm._built.plan.parts
    llm.close()
    assert parts["swap"] == 2**20
    assert parts["tiers"] > 2**20
    with pytest.raises(ValueError, match="kv_tiers: disk has no room for a block"):
        LLM(folder, kv_tiers=f"disk=1KiB:{tmp_path}", progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(KvFileError):
        LLM(folder, kv_tiers=f"disk=1MiB:{tmp_path / 'file'}", progress=False)
    with pytest.raises(ValueError, match="kv_tiers: needs enable_prefix_caching"):
        EngineConfig(kv_tiers="ram=1MiB", enable_prefix_caching=False)
    with pytest.raises(ValueError, match="kv_tiers: ram is swap_space; give one of them"):
        EngineConfig(kv_tiers="ram=1MiB", swap_space=2**21)
    config = EngineConfig(kv_tiers="ram=1MiB")
    assert config.cache.swap_space == 2**20
    assert EngineConfig(**config.values()) == config


def test_tiers_are_read() -> None:
    assert parse_tiers("ram=2GiB,disk=20GiB:/var/kv") == KvTiers(2 * 2**30, 20 * 2**30, "/var/kv")
    assert parse_tiers(" disk=1MiB:a:b ") == KvTiers(0, 2**20, "a:b")
    assert parse_tiers("remote=kv:7070:/k:1") == KvTiers(0, 0, "", ("kv", 7070), "/k:1")
    sealed = KvTiers(0, 1, "/v", None, "", "/k")
    assert parse_tiers("disk=1:/v,disk-key=/k") == parse_tiers("disk-key=/k,disk=1:/v") == sealed
    assert parse_tiers("ram=1,remote=[::1]:7070:k") == KvTiers(1, 0, "", ("::1", 7070), "k")
    assert parse_tiers("role=both,remote=a:1:k") == KvTiers(0, 0, "", ("a", 1), "k", "", "both")
    assert parse_tiers("remote=a:1:k,role=kv_producer").role == "prefill"
    for wrong in (
        "",
        "role=prefill",
        "role=decode,ram=1",
        "role=draft,remote=a:1:k",
        "role=both,role=both,remote=a:1:k",
        "ram",
        "ram=",
        "tape=1GiB",
        "disk=1GiB",
        "ram=1GiB:/x",
        "ram=1,ram=2",
        "disk=x:/y",
        "ram=0",
        "disk-key=/k,ram=1",
        "disk=1:/v,disk-key=",
        "disk=1:/v,disk-key=/a,disk-key=/b",
        "remote=host:7070",
        "remote=host:0:key",
        "remote=:7070:key",
        "remote=a:1:k,remote=b:1:k",
    ):
        with pytest.raises(ValueError, match=r"^kv_tiers: "):
            parse_tiers(wrong)
