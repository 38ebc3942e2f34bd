"""What `quire inspect` says of a method of speculation: its memory, and the speed-up to expect of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import ResolvedConfig
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
    depths = [*(depth for depth in DEPTHS if depth < most), most]
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
    }  # fmt: skip


def _tokens(rate: float, drafts: int) -> float:
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def lines(found: dict[str, Any]) -> list[str]:
    """The report as text."""
    held, expected = found["memory"], found["expected"]
    parts = [f"{name} {format_size(held[name])}" for name in ("proposer", "logits", "weights") if held[name]]
    if held["kv_bytes_per_token"]:
        parts.append(f"{held['kv_bytes_per_token']:.0f} bytes of KV per token")
    depths = sorted({entry["drafts"] for entry in expected})
    made = [
        f"speculation: {found['method']}",
        f"  memory: {', '.join(parts)}",
        f"  a pass for drafts costs {found['draft_cost']:.3g} of a step; expected speed-up, if checking costs nothing:",
        "  accepted" + "".join(f"{depth:>8}" for depth in depths) + "  drafts",
    ]
    for rate in RATES:
        row = [entry for entry in expected if entry["rate"] == rate]
        made.append(f"  {rate:>7.0%} " + "".join(f"{entry['speedup']:>8.2f}" for entry in row))
    return made
