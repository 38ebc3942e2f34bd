"""The options of the KV cache."""

from __future__ import annotations

from quire.config.kv_tiers import KvTiers, parse_tiers
from quire.config.option import check_options, option
from quire.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV cache."""

    block_size: int = option(16, "tokens per KV block, a multiple of 16", metavar="N", count=True, most=2**16)
    num_kv_blocks: int | None = option(
        None,
        "number of KV blocks, within the memory bound (default: as many as fit)",
        metavar="N",
        count=True,
        most=2**31 - 1,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt prefixes")
    cache_policy: str = option(
        "lru",
        "which cached prefixes make room; lru: those not used for longest; lfu: those used least often, where older "
        "uses count less",
        choices=("lru", "lfu"),
    )
    cache_ttl: float | None = option(
        None, "forget cached prefixes that were not used for this many seconds (default: never)", metavar="S"
    )
    cache_pin_share: float = option(
        0.5,
        "part of the KV blocks that each API key may keep by prompt_cache_retention, cache_control or session_id; "
        "they make room when it has no others",
        metavar="SHARE",
    )
    swap_space: int | None = option(
        None,
        "part of --memory for KV blocks that had to give way; they are copied back where that beats computing "
        "them (default: none)",
        metavar="SIZE",
        count=True,
        size=True,
    )

    kv_tiers: str | None = option(
        None,
        "where KV blocks go that leave the cache: ram=SIZE, which is swap_space; disk=SIZE:FOLDER, a file of that "
        "size for each engine process, whose blocks outlive it; disk-key=KEYFILE encrypts it; "
        "remote=HOST:PORT:KEYFILE or remote=/SOCKET:KEYFILE, a quire kv-server that engines share, over TLS with "
        "ca=FILE, the authority of its certificate, or by NIXL with via=nixl; remote=redis://HOST:PORT, a Redis in its "
        "place, in which remote-key=KEYFILE encrypts blocks; "
        "role=prefill, decode or both: how a router may divide requests between such engines (default: nowhere)",
        metavar="TIERS",
    )

    def __post_init__(self) -> None:
        if self.swap_space == 0:  # none, as vLLM writes it
            object.__setattr__(self, "swap_space", None)
        if (tiers := self.tiers) is not None:
            self._take_tiers(tiers)
        check_options(self)
        if self.cache_ttl is not None and not 0 < self.cache_ttl < float("inf"):
            raise ValueError(f"cache_ttl: {self.cache_ttl} is not a positive number of seconds")
        if not 0 <= self.cache_pin_share <= 1:
            raise ValueError(f"cache_pin_share: {self.cache_pin_share} is not from 0 to 1")
        if self.swap_space is not None and not self.enable_prefix_caching:
            raise ValueError("swap_space: needs enable_prefix_caching, by which blocks are found again")
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size: {self.block_size} is not a positive multiple of 16")

    @property
    def tiers(self) -> KvTiers | None:
        """`kv_tiers`, read. Raises ValueError if it is wrong."""
        return None if self.kv_tiers is None else parse_tiers(self.kv_tiers)

    def _take_tiers(self, tiers: KvTiers) -> None:
        if not self.enable_prefix_caching:
            raise ValueError("kv_tiers: needs enable_prefix_caching, by which blocks are found again")
        if tiers.ram and self.swap_space not in {None, tiers.ram}:
            raise ValueError("kv_tiers: ram is swap_space; give one of them")
        if tiers.ram:
            object.__setattr__(self, "swap_space", tiers.ram)
