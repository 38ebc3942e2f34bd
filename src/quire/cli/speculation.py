"""What `quire inspect` says of a method of speculation: its memory, and the speed-up to expect of it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import ResolvedConfig
    from quire.config.speculative import SpeculativeConfig
    from quire.engine.build.drafts import Draft
    from quire.program.program import Program

RATES = tuple(at / 100 for at in range(50, 100, 5))  # of acceptance
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def report(
    program: Program, config: ResolvedConfig, draft: Draft | None, memory: dict[str, Any]
) -> dict[str, Any] | None:
    """Plain JSON values; None where no method was chosen. `memory` is a plan, as far as there is one.

    With a rate of acceptance α, γ drafts and a cost c of each in steps of the model, a step is expected to give
    τ = (1 - α^(γ+1)) / (1 - α) tokens, as fast as τ / (1 + γc) steps without drafts (Leviathan et al., arXiv
    2211.17192). Where one pass makes all drafts (Medusa), c is that of the pass: τ / (1 + c).

    For a tree τ is 1 and the sum over its γ drafts of the chance that they are right, and d passes make it: the d of
    the greatest τ / (1 + dc). α is then the rate of first guesses; those beside them are right as often as is assumed
    of a draft of which nothing is known.
    """
    chosen = config.speculation
    if chosen is None:
        return None
    from quire.program.memory import kv_block_bytes, weight_bytes
    from quire.speculate.build import MAX_DRAFT_TOKENS, draft_cost

    block = config.asked.cache.block_size
    cost = draft_cost(chosen, program, None if draft is None else draft.program)
    heads = draft.heads if draft else 0
    most = min(chosen.num_speculative_tokens, heads or chosen.num_speculative_tokens)
    depths = _up_to(most)
    return {
        "method": chosen.method,
        "memory": {
            "proposer": memory.get("parts", {}).get("drafts"),
            "logits": 4 * MAX_DRAFT_TOKENS * program.vocab,
            "weights": weight_bytes(draft.program) if draft else 0,
            "kv_bytes_per_token": kv_block_bytes(draft.program, block) / block if draft else 0.0,
        },
        "draft_cost": cost,
        "expected": [
            {"rate": rate, "drafts": depth, "tokens": (tokens := _tokens(rate, depth)),
             "speedup": tokens / (1 + (1 if heads else depth) * cost)}
            for rate in RATES
            for depth in depths
        ],
        "trees": _trees(chosen, cost, heads) if chosen.width > 1 else None,
    }  # fmt: skip


def _trees(chosen: SpeculativeConfig, cost: float, heads: int) -> dict[str, Any]:
    from quire.config.speculative import MAX_DEPTH
    from quire.speculate.tree_growth import TreeGrowth

    spread = MAX_DEPTH if heads else chosen.tree_width
    counts = _up_to(chosen.num_speculative_tokens)
    siblings = TreeGrowth(chosen.width).offer(1, 1.0).siblings
    expected = []
    for rate in RATES:
        gains, wrong = [rate], 1 - rate
        for chance in siblings:
            gains.append(wrong * chance)
            wrong *= 1 - chance
        for count in counts:
            best = {"rate": rate, "drafts": count, "depth": 0, "tokens": 1.0, "speedup": 0.0}
            for depth in range(1, min(count, heads or count) + 1):
                tokens = _tree_tokens(gains, spread, count, depth)
                speedup = tokens / (1 + (1 if heads else depth) * cost)
                if speedup > best["speedup"]:
                    best |= {"depth": depth, "tokens": tokens, "speedup": speedup}
            expected.append(best)
    return {"top_k": chosen.top_k, "tree_width": spread, "siblings": list(siblings), "expected": expected}


def _up_to(most: int) -> list[int]:
    return [*(depth for depth in DEPTHS if depth < most), most]


def _tree_tokens(gains: list[float], spread: int, drafts: int, deepest: int) -> float:
    """Tokens that a step is expected to give with the likeliest drafts of a tree: `gains` by rank in a place, up to
    `spread` drafts of one depth with others behind them."""
    waiting, tips, tokens = [(-gains[0], 1, 0)], [0] * (deepest + 1), 1.0
    for _ in range(drafts):
        if not waiting:
            break
        value, depth, rank = heapq.heappop(waiting)
        tokens -= value
        if rank + 1 < len(gains):
            heapq.heappush(waiting, (value / gains[rank] * gains[rank + 1], depth, rank + 1))
        if depth < deepest and tips[depth] < spread:
            tips[depth] += 1
            heapq.heappush(waiting, (value * gains[0], depth + 1, 0))
    return tokens


def _tokens(rate: float, drafts: int) -> float:
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def lines(found: dict[str, Any]) -> list[str]:
    """The report as text."""
    held, expected = found["memory"], found["expected"]
    parts = [f"{name} {format_size(held[name])}" for name in ("proposer", "logits", "weights") if held[name]]
    if held["kv_bytes_per_token"]:
        parts.append(f"{held['kv_bytes_per_token']:.0f} bytes of KV per token")
    made = [
        f"speculation: {found['method']}",
        f"  memory: {', '.join(parts)}",
        f"  a pass for drafts costs {found['draft_cost']:.3g} of a step; expected speed-up, if checking costs nothing:",
        *_table(expected),
    ]
    if trees := found["trees"]:
        beside = ", ".join(f"{chance:.0%}" for chance in trees["siblings"])
        made.append(
            f"  as trees: {trees['top_k']} guesses in a place, behind {trees['tree_width']} of a depth; where the "
            f"first is wrong, the next are right in {beside}:"
        )
        made += _table(trees["expected"])
    return made


def _table(expected: list[dict[str, Any]]) -> list[str]:
    depths = sorted({entry["drafts"] for entry in expected})
    made = ["  accepted" + "".join(f"{depth:>8}" for depth in depths) + "  drafts"]
    for rate in RATES:
        row = [entry for entry in expected if entry["rate"] == rate]
        made.append(f"  {rate:>7.0%} " + "".join(f"{entry['speedup']:>8.2f}" for entry in row))
    return made
