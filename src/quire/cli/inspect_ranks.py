"""`quire inspect --tensor-parallel-size 2`: what each rank holds and receives of others, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.program.rank_nodes import RankNodes
from quire.util.numa import rank_cores
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.program.cost import Machine, Row
    from quire.program.program import Program
    from quire.spec import ModelSpec

MEETING_SECONDS = 4e-6  # of a collective between processes of one host: assumed
HOST_SECONDS = 50e-6  # of one between hosts, and of what a stage leaves for another host: assumed
HOST_BANDWIDTH = 1.25e9  # bytes a second between hosts: that of 10 Gbit/s, assumed


def report(
    spec: ModelSpec,
    programs: Sequence[Program],
    threads: int,
    memory: dict[str, Any],
    steps: dict[str, list[Row]],
    machine: Machine | None,
    hosts: int = 1,
) -> dict[str, Any] | None:
    """Plain JSON values; None where there is one rank. `threads` are those of each, `memory` is the plan of all ranks
    of a host, `machine` the limits of all threads of one of the `hosts` together.

    The least time of a step is that of its stages one after the other: in each, of the slowest rank with its part of
    the machine, plus what it receives at the memory's bandwidth, plus MEETING_SECONDS for each collective. What comes
    from other hosts takes HOST_SECONDS and HOST_BANDWIDTH instead. Raises UnsupportedModelError for ranks that cannot
    be spread over so many hosts.
    """
    if not programs:
        return None
    plan = programs[0].plan
    places = rank_cores(len(programs), hosts)
    nodes = RankNodes(plan.tensor_parallel_size, plan.pipeline_parallel_size, hosts)
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "node": nodes.node_of(rank), "cores": sorted(places[rank])}
        | _held(spec, program, memory)
        | {"steps": {name: _step(program, rows, machine, nodes, rank) for name, rows in steps.items()}}
        for rank, program in enumerate(programs)
    ]  # fmt: skip
    size = plan.tensor_parallel_size
    seconds = None if machine is None else {
        name: sum(
            max(each["steps"][name]["seconds"] for each in ranks[first : first + size])
            for first in range(0, len(ranks), size)
        )
        for name in steps
    }  # fmt: skip
    return {
        "tensor_parallel_size": size,
        "pipeline_parallel_size": plan.pipeline_parallel_size,
        "expert_parallel": plan.expert_parallel,
        "threads": threads,
        "hosts": hosts,
        "ranks": ranks,
        "step_seconds": seconds,
    }


def _held(spec: ModelSpec, program: Program, memory: dict[str, Any]) -> dict[str, Any]:
    from quire.program.memory import kv_block_bytes, plan_arena, weight_bytes
    from quire.spec import Attention, LatentAttention, MoE

    plan, limits = program.plan, memory.get("limits")
    layers = plan.layers(len(spec.layers))
    found: dict[str, Any] = {
        "stage": plan.pipeline_parallel_rank, "layers": [layers.start, layers.stop - 1],
        "weight_bytes": weight_bytes(program),
    }  # fmt: skip
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention | LatentAttention)]
    if mixers:
        kv = mixers[0].kv_heads if isinstance(mixers[0], Attention) else mixers[0].heads
        heads, kv_heads = plan.heads(mixers[0].heads, kv)
        found |= {"heads": [heads.start, heads.stop - 1], "kv_heads": [kv_heads.start, kv_heads.stop - 1]}
    router = next((layer.mlp.router for layer in spec.layers if isinstance(layer.mlp, MoE)), None)
    if router:
        share = plan.experts(router.experts, router.top_k)
        own = [place for place in range(share.start, share.stop) if place < router.experts]
        found["experts"] = [share.start, own[-1]] if own else []
        found["expert_copies"] = share.count - len(own)
    if limits:
        found["kv_bytes"] = limits["num_blocks"] * kv_block_bytes(program, limits["block_size"])
        found["activation_bytes"] = plan_arena(program, limits["max_tokens"], limits["max_logit_rows"]).total
    return found


def _step(
    program: Program, rows: list[Row], machine: Machine | None, nodes: RankNodes, rank: int
) -> dict[str, Any]:
    from quire.program.cost import Machine, step_cost

    costs = step_cost(program, rows, len(rows))
    meetings = sum(1 for cost in costs.ops if cost.wire_bytes)
    total = costs.total
    # A rank takes the rows of one rank on each other host of its stage, for all ranks there.
    peers, size = len(nodes.peers(rank)), program.plan.tensor_parallel_size
    between = total.wire_bytes * peers // max(1, size - 1)
    ways = _ways(nodes, rank)
    given = sum(4 * program.buffer(each.buffer).cols for each in program.inputs) * sum(
        row.query_len for row in rows
    )
    found = {
        "bytes": total.bytes, "wire_bytes": total.wire_bytes, "meetings": meetings,
        "host_bytes": between + (given if ways else 0),
    }  # fmt: skip
    if machine is None:
        return found
    here = len(nodes.here(rank))
    part = Machine(machine.flops / here, machine.bandwidth / here)
    wire = (total.wire_bytes - between) / part.bandwidth + between / HOST_BANDWIDTH
    wire += meetings * (HOST_SECONDS if peers else MEETING_SECONDS)
    wire += ways * (HOST_SECONDS + given / HOST_BANDWIDTH)
    return found | {"seconds": total.bound(part) + wire, "wire_seconds": wire}


def _ways(nodes: RankNodes, rank: int) -> int:
    """How often what the stage before leaves for a rank is sent between hosts: host 0 passes on what is not for it."""
    if rank < nodes.size:
        return 0
    own, before = nodes.node_of(rank), nodes.node_of(nodes.before(rank).start)
    return 0 if own == before else (own != 0) + (before != 0)


def lines(found: dict[str, Any]) -> list[str]:
    """The report in readable form."""
    experts = ", whole experts" if found["expert_parallel"] else ""
    over = f", on {found['hosts']} hosts" if found["hosts"] > 1 else ""
    made = [
        f"ranks ({found['tensor_parallel_size']} in each of {found['pipeline_parallel_size']} stages{experts}{over}, "
        f"{found['threads']} threads each)"
    ]
    for each in found["ranks"]:
        held = [
            f"{name} {_range(each[key])}"
            for key, name in (
                ("layers", "layers"),
                ("heads", "heads"),
                ("kv_heads", "KV heads"),
                ("experts", "experts"),
            )
            if each.get(key)
        ]
        if each.get("expert_copies"):
            held.append(f"{each['expert_copies']} more for copies")
        host = f" of host {each['node']}" if found["hosts"] > 1 else ""
        where = f"; on processors {', '.join(map(str, each['cores']))}" if each["cores"] else ""
        made.append(f"  rank {each['rank']}{host}: {', '.join(held)}{where}")
        sizes = [
            f"{name} {format_size(each[key])}"
            for key, name in (
                ("weight_bytes", "weights"),
                ("kv_bytes", "KV"),
                ("activation_bytes", "activations"),
            )
            if key in each
        ]
        made.append(f"    {', '.join(sizes)}")
        for name, step in each["steps"].items():
            time = f", {step['wire_seconds'] * 1e6:.0f} µs" if "wire_seconds" in step else ""
            other = f", {format_size(step['host_bytes'])} from other hosts" if step["host_bytes"] else ""
            made.append(
                f"    {name}: receives {format_size(step['wire_bytes'])} in {step['meetings']} collectives{other}{time}"
            )
    if found["step_seconds"]:
        times = (f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found["step_seconds"].items())
        made.append(f"  a step takes at least: {', '.join(times)}")
        if found["hosts"] > 1:
            made.append(
                f"    assumed between hosts: {HOST_SECONDS * 1e6:.0f} µs, and {HOST_BANDWIDTH * 8e-9:g} Gbit/s"
            )
    return made


def _range(ends: list[int]) -> str:
    first, last = ends
    return str(first) if first == last else f"{first}–{last}"
