"""Hosts for so many users at a time, by what their KV caches take."""

from __future__ import annotations

from quire.planner.devices import Device
from quire.planner.figure import at_least
from quire.planner.model_size import ModelSize
from quire.planner.step_bound import RankLayout, StepBound
from quire.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """`cache_gb` of a user over all devices; `groups` of devices on a host, each with the whole model; `users` that fit
    a host. All are 0 if the model does not fit one.
    """

    cache_gb: float
    groups: int
    users: int
    hosts: int
    devices: int


def hosts_for(
    model: ModelSize, device: Device, count: int, *, users: int, tokens: int, bits: float, kv_bits: float,
    reserve_gb: float = 0.0, decode_share: float = 1.0,
) -> HostNeed:  # fmt: skip
    """Hosts of `count` devices that hold the caches of `users` sequences of `tokens`. Of the group sizes that divide a
    host the one that leaves most room counts; `decode_share` of the devices hold caches."""
    decoding = max(1, int(count * decode_share))
    cache = model.kv_values * kv_bits / 8 * tokens / 1e9
    best = HostNeed(cache_gb=cache, groups=0, users=0, hosts=0, devices=0)
    for ranks in range(1, decoding + 1):
        if decoding % ranks or model.heads % ranks:
            continue
        bound = StepBound(model=model, device=device, layout=RankLayout(ranks), bits=bits, kv_bits=kv_bits)
        groups = decoding // ranks
        held = groups * bound.sequences(tokens, reserve_gb)
        if held > best.users:
            hosts = at_least(users / held)
            best = HostNeed(cache_gb=cache, groups=groups, users=held, hosts=hosts, devices=hosts * count)
    return best
