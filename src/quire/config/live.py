"""What an administrator may change while a server runs: GET and PATCH /admin/config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any

from quire.config.schema import POLICIES
from quire.objectives import class_policies, parse_classes
from quire.records import dataclass

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEngineConfig:
    """The part that the engine obeys between two steps. `cache_shares`: parts of the KV cache by cache domain."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    scheduling_policy: str
    overtake_ms: float
    slo: tuple[str, ...]
    cache_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """All of it, as it is in force. Field names are options; `max_draft_tokens` are the drafts of speculation that a
    step runs, 0 for none; `cache_shares` are parts of the KV cache by cache domain."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    scheduling_policy: str
    overtake_ms: float
    slo: tuple[str, ...]
    admission: str
    log_level: str
    cache_shares: Mapping[str, float] = field(default_factory=dict)

    def changed(self, changes: Mapping[str, Any]) -> LiveConfig:
        """With some fields changed. Raises ValueError naming the first field that is unknown or wrong, or the policy if
        it names a class that there is not."""
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in _CHECKS:
                raise ValueError(f"{name}: cannot be changed while the server runs; {', '.join(_CHECKS)} can")
            values[name] = _CHECKS[name](name, value)
        found = replace(self, **values)
        class_policies(found.scheduling_policy, parse_classes(found.slo), POLICIES)
        return found

    @property
    def engine(self) -> LiveEngineConfig:
        """The engine's part."""
        return LiveEngineConfig(**{f.name: getattr(self, f.name) for f in fields(LiveEngineConfig)})


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name}: must be an integer of at least {least}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: must be a number above 0")
    return float(value)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: must be one of {', '.join(choices)}")
    return str(value)


def _classes(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name}: must be a list of texts like interactive:ttft=500ms")
    parse_classes(value)
    return tuple(value)


def _policy(name: str, value: Any) -> str:
    """A policy, and those of classes; which classes there are is checked with the rest."""
    for part in str(value).split(","):
        _choice(name, part.rpartition("=")[2], POLICIES)
    return str(value)


def _shares(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: must be an object of tenants and their shares")
    for tenant, share in value.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"{name}: {str(tenant)[:64]}: must be a number in [0, 1]")
    if (total := sum(value.values())) > 1 + 1e-9:
        raise ValueError(f"{name}: they add up to {total:g}, above 1")
    return {str(tenant): float(share) for tenant, share in value.items()}


_CHECKS = {
    "max_num_seqs": _count,
    "max_num_batched_tokens": _count,
    "max_draft_tokens": lambda name, value: _count(name, value, 0),
    "max_num_queued_reqs": _count,
    "max_num_queued_tokens": _count,
    "scheduling_policy": _policy,
    "overtake_ms": _number,
    "slo": _classes,
    "admission": lambda name, value: _choice(name, value, ("predict", "queue")),
    "log_level": lambda name, value: _choice(name, value, LOG_LEVELS),
    "cache_shares": _shares,
}
