"""`quire inspect`: how many sequences the memory of the KV cache holds, beside those of a bfloat16 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig
    from quire.engine.build.opening import Model
    from quire.program.program import Program


def report(
    model: Model, asked: EngineConfig, program: Program, memory: dict[str, Any], context: int
) -> dict[str, Any] | None:
    """How many sequences of `context` tokens the memory of the KV cache holds, in its format and in bfloat16."""
    from quire.core.capacity import peak_blocks
    from quire.engine.build.assemble import choose, machine_facts
    from quire.program.memory import kv_block_bytes

    if "error" in memory or not program.kv_layers:
        return None

    def fit(of: Program, size: int) -> int:
        blocks = memory["parts"]["kv"] // kv_block_bytes(of, size)
        return int(blocks // peak_blocks(of.cache_groups, context, 1, size))

    found = {"context": context, program.kv_type: fit(program, memory["limits"]["block_size"])}
    if program.kv_type != "bf16":
        plain = asked.replace(kv_cache_dtype="bfloat16", kv_cache_scales=None)
        config, other = choose(model, plain, machine_facts(asked.execution.executor))
        found["bf16"] = fit(other, config.asked.cache.block_size)
    return found


def line(users: dict[str, Any], kv: str) -> str:
    beside = f", of {users['bf16']} in the same memory with bf16" if kv != "bf16" else ""
    return f"  room for {users[kv]} sequences of {users['context']} tokens with {kv}{beside}"
