"""The memory promise: every byte of the process belongs to a named part, and the sum is known before it is spent.

    bound = process + weights + tables + activations + step + sampler + per block · blocks

`process` is what is resident before weights are loaded (interpreter, libraries, tokenizer) plus a fixed allowance
for what grows while serving. A block's price is its KV bytes plus the bookkeeping of its tokens: token ids in
Python lists, the radix tree, block tables.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.schema import ResolvedConfig
from quire.core.capacity import least_blocks
from quire.executor.base import Limits, step_array_bytes
from quire.executor.native import planned_bytes
from quire.program.memory import kv_block_bytes
from quire.program.ops import Program
from quire.records import dataclass
from quire.types import MAX_NAMED_TOKENS, MemoryBudgetError
from quire.util.sizes import format_size
from quire.worker.sampler import Sampler

# What Python objects cost for each token that a block can hold: ids in lists (8 bytes a reference, 28 an int),
# twice (request and sequence), the radix tree's key, and detokenized text.
TOKEN_OVERHEAD = 128
# Growth of the process while serving: allocator slack, text, requests, log records, thread stacks.
PROCESS_ALLOWANCE = 64 * 2**20
MIN_MODEL_LEN = 128


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and the limits that follow from them."""

    bound: int
    parts: dict[str, int]
    limits: Limits
    block_bytes: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        """The sum as people read it, one part a line."""
        width = max(len(name) for name in self.parts)
        lines = [f"{name:<{width}}  {format_size(size):>11}" for name, size in self.parts.items()]
        tokens = self.limits.num_blocks * self.limits.block_size
        lines.append(f"{'sum':<{width}}  {format_size(self.total):>11}  of {format_size(self.bound)}")
        lines.append(
            f"{self.limits.num_blocks} KV blocks of {self.limits.block_size} tokens: {tokens} tokens"
        )
        return lines


def plan_memory(program: Program, config: ResolvedConfig, process_bytes: int, beside: int = 0) -> MemoryPlan:
    """Divide the bound: fixed parts first, KV blocks from the rest.

    `process_bytes` is the resident size before weights are loaded, `beside` what another process of the same
    server holds and will hold. A context length that was not asked for is halved until one sequence of it fits.
    Raises MemoryBudgetError, with the sum by part and what to change, when not even that fits.
    """
    length = config.max_model_len
    while True:
        plan, needed = _plan(program, config, process_bytes + PROCESS_ALLOWANCE, beside, length)
        if plan.limits.num_blocks >= needed:
            return plan
        if not config.shrink_model_len or length <= MIN_MODEL_LEN:
            raise MemoryBudgetError(_refusal(plan, needed, length, config))
        length = max(MIN_MODEL_LEN, length // 2)


def _plan(
    program: Program, config: ResolvedConfig, process: int, beside: int, length: int
) -> tuple[MemoryPlan, int]:
    """A plan for a context length, and the least blocks in which one sequence of that length runs.

    With those alone, chunks of a prompt get as short as the blocks behind the windows become free.
    """
    asked = config.asked
    limits = Limits(
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        max_logit_rows=config.max_num_seqs,
        max_len=length,
        num_blocks=0,
        block_size=asked.block_size,
    )
    planned = planned_bytes(program, limits, config.threads)
    fixed = {
        "process": process,
        **({"server": beside} if beside else {}),
        "weights": planned["weights"],
        "tables": planned["tables"],
        "activations": planned["activations"],
        "step": step_array_bytes(limits, len(program.cache_groups)),
        "sampler": Sampler.memory_bound(
            program.vocab, config.max_num_seqs, config.threads, length, MAX_NAMED_TOKENS
        ),
    }
    kv_bytes = kv_block_bytes(program, asked.block_size)
    block_bytes = kv_bytes + TOKEN_OVERHEAD * asked.block_size
    groups, chunk = program.cache_groups, config.max_num_batched_tokens
    at_speed = least_blocks(groups, length, chunk, asked.block_size)
    least = least_blocks(groups, length, 1, asked.block_size) if asked.enable_chunked_prefill else at_speed
    blocks = max(0, config.memory - sum(fixed.values())) // block_bytes
    if asked.num_kv_blocks is not None:
        if asked.num_kv_blocks > blocks:
            raise MemoryBudgetError(
                f"num_kv_blocks: {asked.num_kv_blocks} blocks of {format_size(block_bytes)} do not fit; "
                f"{format_size(config.memory)} holds {blocks}"
            )
        blocks = asked.num_kv_blocks
    elif asked.memory is None:  # not asked to use it all: enough for every slot to be full, and as much again
        blocks = min(blocks, 2 * at_speed * config.max_num_seqs)
    parts = {**fixed, "kv": blocks * kv_bytes, "text": blocks * (block_bytes - kv_bytes)}
    return MemoryPlan(config.memory, parts, replace(limits, num_blocks=blocks), block_bytes), least


def _refusal(plan: MemoryPlan, needed: int, length: int, config: ResolvedConfig) -> str:
    short = plan.total + (needed - plan.limits.num_blocks) * plan.block_bytes
    advice = [f"raise --memory to at least {format_size(short * 1.01)}"]
    if length > MIN_MODEL_LEN:
        advice.append(f"lower --max-model-len ({length})")
    if config.max_num_batched_tokens > 64:
        advice.append(f"lower --max-num-batched-tokens ({config.max_num_batched_tokens})")
    if config.max_num_seqs > 1:
        advice.append(f"lower --max-num-seqs ({config.max_num_seqs})")
    if config.weights == "f32":
        advice.append("use --dtype bfloat16")
    if config.kv != "i8":
        advice.append(f"use --kv-cache-dtype {'bfloat16' if config.kv == 'f32' else 'int8'}")
    parts = "; ".join(f"{name} {format_size(size)}" for name, size in plan.parts.items() if size)
    return (
        f"memory: {format_size(config.memory)} cannot hold one sequence of {length} tokens, which needs "
        f"{format_size(short)} ({parts}; KV for one sequence {format_size(needed * plan.block_bytes)}). "
        f"To fit: {', or '.join(advice)}."
    )
