"""The tiers of an engine's KV blocks: host memory, a disk, a server."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from hashlib import blake2b, sha256
from pathlib import Path

from quire import _native
from quire.config.cache import CacheOptions
from quire.config.schema import ResolvedConfig
from quire.engine.build.drafts import Draft
from quire.engine.build.load_weights import weights_fingerprint
from quire.engine.build.opening import Model
from quire.program.program import Program
from quire.routing.tickets import read_key
from quire.util.platform import usable_cores
from quire.worker.block_tiers import BlockTiers
from quire.worker.disk_tier import DiskTier, tier_bytes
from quire.worker.kept_blocks import KeptBlocks
from quire.worker.redis_tier import RedisTier, redis_bytes
from quire.worker.remote_tier import RemoteTier, remote_bytes
from quire.worker.swap_space import SwapSpace


def tier_parts(asked: CacheOptions, block_bytes: int) -> dict[str, int]:
    """Memory that the tiers take, by part."""
    tiers = asked.tiers
    disk = 0
    if tiers and tiers.disk:
        disk = tier_bytes(tiers.disk, block_bytes, sealed=bool(tiers.disk_key))
    remote = 0
    if tiers and tiers.remote:
        remote = remote_bytes(block_bytes, shared=isinstance(tiers.remote, str), nixl=tiers.nixl)
    elif tiers and tiers.redis:
        remote = redis_bytes(block_bytes, sealed=bool(tiers.remote_key))
    return {"swap": asked.swap_space or 0, "tiers": disk + remote}


def make_tiers(
    model: Model,
    config: ResolvedConfig,
    programs: Sequence[Program],
    block_bytes: int,
    swap: SwapSpace | None,
    draft: Draft | None,
) -> BlockTiers | None:
    """Tiers on a disk and a server over the swap space, if asked for and the model keeps blocks between requests.

    `programs` are those of all ranks. Raises KvFileError, and ValueError where blocks cannot be taken back alone, none
    fits, or a key cannot be read.
    """
    tiers, spec = config.asked.cache.tiers, model.facts.spec
    if (
        tiers is None
        or not (tiers.disk or tiers.remote or tiers.redis)
        or spec.whole
        or spec.pooling is not None
    ):
        return None
    if draft is not None:
        raise ValueError("kv_tiers: not with a draft model, whose keys and values would be missing")
    mark = engine_fingerprint(model, config, programs)
    key, disk_key = _key("remote", tiers.key_file), _key("disk-key", tiers.disk_key)
    kept: list[KeptBlocks] = []
    if tiers.disk:
        kept.append(DiskTier(Path(tiers.folder), tiers.disk, block_bytes, mark, disk_key))
    if tiers.remote is not None:
        kept.append(RemoteTier(tiers.remote, key, block_bytes, mark, _tls(tiers.authority), nixl=tiers.nixl))
    elif tiers.redis:
        remote_key, _ = _key("remote-key", tiers.remote_key), _tls(tiers.authority)  # both can be read
        kept.append(RedisTier(tiers.redis, block_bytes, mark, remote_key, tiers.authority))
    crowded = _crowded(config, len(programs))
    return BlockTiers(swap, kept, eager=tiers.role in {"prefill", "both"}, crowded=crowded)


def _crowded(config: ResolvedConfig, ranks: int) -> float:
    """The share of this host's cores that steps run on: those of a device need one."""
    on_cpu = config.asked.execution.device == "cpu"
    threads = ranks * config.asked.replica[1] * config.threads if on_cpu else 1
    return min(1.0, threads / usable_cores())


def _key(name: str, path: str) -> bytes:
    """The key in a file, if one is named."""
    try:
        return read_key(path) if path else b""
    except ValueError as error:
        raise ValueError(f"kv_tiers: {name}: {error}") from None


def _tls(authority: str) -> ssl.SSLContext | None:
    """TLS with a server whose certificate is of an authority, in a file; None without one."""
    if not authority:
        return None
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ValueError(f"kv_tiers: ca: {authority}: {error.strerror or error}") from None


def engine_fingerprint(
    model: Model, config: ResolvedConfig, programs: Sequence[Program], *, copies: bool = False
) -> bytes:
    """All that determines the content of a block besides tenant, adapter and tokens: weights, formats, layout, and the
    code that computes, to the instruction set. `copies`: equal for copies of the weights, see loader.fingerprint."""
    from quire import __version__

    asked = config.asked
    kernels = sha256(Path(_native.__file__).read_bytes()).hexdigest()
    executor = asked.execution.executor, asked.execution.device, config.isa or _native.supported_isas()[0]
    random = (
        (asked.loading.load_format, asked.execution.seed) if asked.loading.load_format == "random" else ()
    )
    scales = asked.formats.kv_cache_scales
    levels = sha256(Path(scales).read_bytes()).hexdigest() if scales else ""
    parts = (
        __version__, kernels, executor, model.facts.config_sha256,
        weights_fingerprint(model, asked, copies=copies), random, levels, asked.cache.block_size, *programs,
    )  # fmt: skip
    return blake2b("\0".join(map(repr, parts)).encode(), digest_size=64).digest()
