"""The memory promise: every byte of the process belongs to a named part, and the sum is known before it is spent.

    bound = process + steps + server + weights + tables + activations + adapters + step + branches + sampler + drafts
            + records + vocabulary + grammars + compiler + requests + per block · blocks

`process` and `server` are what the engine process and the server process hold when the plan is made, before weights are
loaded; `steps` is what running steps adds to the first, and the server's part includes what serving adds to the second.
The cost of a block is its KV bytes plus its bookkeeping. What requests hold (bodies, prompts, answers, in both
processes) is a separate part, which the server uses to admit them (server/request_memory). docs/memory.md explains each
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.cache_kinds import FLOAT_KV
from quire.config.schema import AdapterOptions, ResolvedConfig
from quire.core.capacity import least_blocks
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import REQUESTS
from quire.engine.build.disk_tiers import tier_parts
from quire.engine.build.drafts import Draft
from quire.engine.build.log_file import recorder_bytes
from quire.executor.base import ExecutorKind, Limits, step_array_bytes
from quire.loader.load import ROW_QUANTUM
from quire.lora import BLOCK_BYTES
from quire.program.memory import adapter_layout, largest_adapter, low_rank_bytes
from quire.program.program import Program
from quire.records import dataclass
from quire.speculate.build import max_draft_tokens, proposer_bytes, tree_branches
from quire.structured.compile_bounds import PLANNED_BYTES
from quire.structured.grammar_limits import UNIQUE_BYTES
from quire.text.token_bytes import MAX_MEAN_BYTES
from quire.types import MAX_LOGPROBS, MemoryBudgetError
from quire.util.sizes import format_size

# An eighth of the rest, within these bounds.
REQUEST_SHARE, MIN_REQUESTS, MAX_REQUESTS = 8, 8 * 2**20, 2**30
# Bookkeeping of a block: a node of the prefix cache with its slot in dictionaries and heaps, and per token four
# bytes of key and its share of the tables. Measured: 740 bytes with 16 tokens, 930 with 64, and 49 of the digest.
BLOCK_OVERHEAD, TOKEN_OVERHEAD = 824, 5
DRAFT_OVERHEAD = 160  # of a block: the text that a draft model has computed in it
# What steps add to the engine process: code pages that run for the first time (0.5 MiB measured), records of the latest
# steps, messages to and from the server.
STEP_GROWTH = 2 * 2**20
THREAD_GROWTH = 128 * 2**10  # the used part of a thread's stack, and its share of the allocator
# The logprobs of one position in one step: in tables, as bytes, in a frame, in the socket.
LOGPROB_BYTES = 4 * 12 * (MAX_LOGPROBS + 2)
# A sixteenth of the rest, within these bounds; nothing if that, the first grammar and the compiler took more than a
# third of it.
GRAMMAR_MOST = 3
GRAMMAR_SHARE, MIN_GRAMMARS, MAX_GRAMMARS = 16, 8 * 2**20, 256 * 2**20
# What the first grammar adds: the library and its threads (5 MiB measured), and the trie of tokens, with those parts of
# it that masks of texts take (650 bytes a token of quire-mini, 741 of 128k tokens with 10 bytes on the average), and
# the order of tokens for texts that come once.
GRAMMAR_LIBRARY, GRAMMAR_TOKEN = 8 * 2**20, 768 + 24
# The bytes of a token and their end, in both processes of a server: see host/messages.Vocabulary.
VOCABULARY_TOKEN = 2 * (MAX_MEAN_BYTES + 4)
SMALL_ADAPTERS = 16  # that may be in the pool in the room of one of the largest
ADAPTERS_READ = 2  # adapters that are read at once: one to be checked, one for a slot
MIN_MODEL_LEN = 128
MAX_BLOCKS = 2**31 - 1  # the largest number in a block table


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and the limits that follow from them."""

    bound: int
    parts: dict[str, int]
    limits: Limits
    block_bytes: int
    grammar_memory: int  # the part of "grammars" that compiled ones share

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        """The sum in readable form, one part per line."""
        width = max(len(name) for name in self.parts)
        lines = [f"{name:<{width}}  {format_size(size):>11}" for name, size in self.parts.items()]
        tokens = self.limits.num_blocks * self.limits.block_size
        lines.append(
            f"{'sum':<{width}}  {format_size(self.total):>11}  at most, of {format_size(self.bound)}"
        )
        lines.append(
            f"{self.limits.num_blocks} KV blocks of {self.limits.block_size} tokens: {tokens} tokens"
        )
        return lines


def plan_memory(
    program: Program,
    config: ResolvedConfig,
    kind: ExecutorKind,
    process_bytes: int,
    beside: Mapping[str, int] | None = None,
    tokenizer_bytes: int = 0,
    draft: Draft | None = None,
) -> MemoryPlan:
    """Divide the bound: fixed parts first, KV blocks from the rest.

    `kind` knows what the executor will hold. `process_bytes` is the resident size before weights are loaded, `beside`
    what the other process of a server holds and will hold, by part; what requests hold there is in the plan's own part.
    `tokenizer_bytes` is what a tokenizer takes that this process reads for its first grammar. A `draft` model is in the
    parts of the model.
    A context length that was not asked for is halved until one sequence of it fits.
    Raises MemoryBudgetError, with the sum by part and what to change, when not even that fits.
    """
    length = config.max_model_len
    while True:
        held = {"process": process_bytes, **(beside or {}), "grammars": tokenizer_bytes}
        plan, needed = _plan(program, config, kind, held, length, draft)
        if plan.limits.num_blocks >= needed:
            return plan
        if not config.shrink_model_len or length <= MIN_MODEL_LEN:
            raise MemoryBudgetError(_refusal(plan, needed, length, config))
        length = max(MIN_MODEL_LEN, length // 2)


def _plan(
    program: Program,
    config: ResolvedConfig,
    kind: ExecutorKind,
    held: Mapping[str, int],
    length: int,
    draft: Draft | None,
) -> tuple[MemoryPlan, int]:
    """A plan for a context length, and the fewest blocks in which one sequence of that length can run.

    With only those, chunks of a prompt shrink to the blocks that become free behind the windows.
    """
    asked = config.asked
    limits = Limits(
        max_tokens=config.max_num_batched_tokens,
        max_rows=config.max_num_seqs,
        max_logit_rows=config.max_num_seqs + max_draft_tokens(config, program.cache_groups),
        max_len=length,
        num_blocks=0,
        block_size=asked.cache.block_size,
        **_adapter_pool(kind.held(program), asked.adapters),
        branches=tree_branches(config),
        # A branch touches no more blocks of a group than it has drafts.
        branch_blocks=tree_branches(config) * len(program.cache_groups),
    )
    computing, kv_bytes = _computing(program, kind, limits, draft, asked.adapters)
    fixed = {
        "process": held["process"],
        "steps": STEP_GROWTH + config.threads * THREAD_GROWTH + limits.max_tokens * LOGPROB_BYTES,
        **held,
        **computing,
        "sampler": 0 if program.pools else kind.sampler_bytes(program, limits),
        "drafts": proposer_bytes(config, length, program.vocab)
        + (draft.kept_bytes(limits, program.vocab) if draft else 0),
        **tier_parts(asked.cache, kv_bytes),
        "records": recorder_bytes(asked),
        "vocabulary": program.vocab * VOCABULARY_TOKEN,
        **dict.fromkeys(("grammars", "compiler"), 0),
    }
    overhead = BLOCK_OVERHEAD + TOKEN_OVERHEAD * asked.cache.block_size + (DRAFT_OVERHEAD if draft else 0)
    block_bytes = kv_bytes + overhead
    groups, chunk = program.cache_groups, config.max_num_batched_tokens
    at_speed = least_blocks(groups, length, chunk, asked.cache.block_size)
    whole = not asked.scheduler.enable_chunked_prefill or program.whole
    least = at_speed if whole else least_blocks(groups, length, 1, asked.cache.block_size)
    rest, grammars = config.memory - sum(fixed.values()), 0
    if not program.pools:
        fixed["grammars"], fixed["compiler"], grammars = _grammar_parts(
            rest, held["grammars"], program.vocab, limits, config
        )
    rest -= fixed["grammars"] + fixed["compiler"]
    fixed[REQUESTS] = asked.limits.request_memory or max(
        MIN_REQUESTS, min(rest // REQUEST_SHARE, MAX_REQUESTS)
    )
    enough = 2 * at_speed * config.max_num_seqs
    blocks = _blocks(config, rest - fixed[REQUESTS], block_bytes, enough)
    if program.whole:  # a text has blocks for a step alone; each but the last one is full
        blocks = min(blocks, chunk // asked.cache.block_size + config.max_num_seqs)
    parts = {**fixed, "kv": blocks * kv_bytes, "blocks": blocks * (block_bytes - kv_bytes)}
    return MemoryPlan(config.memory, parts, replace(limits, num_blocks=blocks), block_bytes, grammars), least


def _blocks(config: ResolvedConfig, room: int, block_bytes: int, enough: int) -> int:
    """KV blocks in so many bytes. Where no bound is given, no more than `enough`: twice what all slots need."""
    blocks, asked = min(max(0, room) // block_bytes, MAX_BLOCKS), config.asked
    if asked.cache.num_kv_blocks is not None:
        if asked.cache.num_kv_blocks > blocks:
            raise MemoryBudgetError(
                f"num_kv_blocks: {asked.cache.num_kv_blocks} blocks of {format_size(block_bytes)} do not fit; "
                f"{format_size(config.memory)} holds {blocks}"
            )
        return asked.cache.num_kv_blocks
    return blocks if asked.limits.memory is not None else min(blocks, enough)


def _computing(
    program: Program, kind: ExecutorKind, limits: Limits, draft: Draft | None, asked: AdapterOptions
) -> tuple[dict[str, int], int]:
    """What the executors hold by part, and the bytes of keys and values in a block."""
    every = [(program, limits, len(program.cache_groups))]
    if draft is not None:
        every.append((draft.program, draft.limits(limits), 0))
    planned = [kind.planned_bytes(each, its_limits) for each, its_limits, _ in every]
    parts = {
        part: sum(each[part] for each in planned) for part in ("weights", "tables", "activations", "adapters")
    }
    parts["step"] = sum(
        step_array_bytes(its_limits, groups, overlaps=each.plan.overlaps)
        for each, its_limits, groups in every
    )
    parts["adapters"] += _adapters_read(kind.held(program), asked)
    parts["branches"] = sum(
        its_limits.branch_blocks * kind.block_bytes(each, limits.block_size) for each, its_limits, _ in every
    )
    return parts, sum(kind.block_bytes(each, limits.block_size) for each, _, _ in every)


def _adapter_pool(programs: Sequence[Program], asked: AdapterOptions) -> dict[str, int]:
    """The fields of Limits for the pool of adapters on all ranks, which have equally many pages. Raises
    MemoryBudgetError for one that holds no adapter."""
    if not asked.enable_lora:
        return {}
    layouts, largest = list(map(adapter_layout, programs)), map(largest_adapter, programs)
    each = max(layout.pages(shape.parts, shape.own) for layout, shape in zip(layouts, largest, strict=True))
    pages, page_bytes = asked.max_loras * each, sum(layout.page_bytes for layout in layouts)
    if asked.lora_memory is not None:
        pages = asked.lora_memory // page_bytes
        if pages < each:
            raise MemoryBudgetError(
                f"lora_memory: {format_size(asked.lora_memory)} holds no adapter of max_lora_rank {asked.rank}, which "
                f"takes {format_size(each * page_bytes)}"
            )
    return {"max_loras": min(pages, SMALL_ADAPTERS * -(-pages // each)), "adapter_pages": pages}


def _adapters_read(programs: Sequence[Program], asked: AdapterOptions) -> int:
    """What adapters take outside of the pool, in float32: those that are being read, and those that are kept; and
    blocks of whole matrices, of the base or an adapter, as they are stored and in float32, which are never kept. Ranks
    that do not lead take one module, or block, after the other."""
    if not programs[0].adapted:
        return 0
    low_rank = sum(map(low_rank_bytes, programs))
    widest = max(adapted.cols for program in programs for adapted in program.adapted)
    most = max(BLOCK_BYTES, 4 * ROW_QUANTUM * widest)
    blocks = (ADAPTERS_READ * 2 + len(programs) - 1) * most
    modules = sum(map(_largest_module, programs)) if len(programs) > 1 else 0
    return 2 * low_rank * (ADAPTERS_READ + (asked.max_cpu_loras or 0)) + blocks + modules


def _largest_module(program: Program) -> int:
    """Bytes of A, B and gain of the largest module of an adapter, in float32."""
    return max(
        (4 * each.rank * (each.cols + max(each.rows)) + 4 * max(each.rows) for each in program.adapted),
        default=0,
    )


def _grammar_parts(
    rest: int, tokenizer: int, vocab: int, limits: Limits, config: ResolvedConfig
) -> tuple[int, int, int]:
    """The parts of grammars and of their compiler, and what compiled grammars share of the first.

    The first grammar brings the trie of tokens; and for each row two lines of a bitmask, filled with others or apart,
    and the texts that come once in its answer.
    """
    masks = vocab * (GRAMMAR_TOKEN + limits.max_logit_rows // 4)
    unique = limits.max_rows * (UNIQUE_BYTES + 4 * limits.max_len)
    first, asked = tokenizer + GRAMMAR_LIBRARY + masks + unique, config.asked.limits.grammar_memory
    grammars = asked or max(MIN_GRAMMARS, min(rest // GRAMMAR_SHARE, MAX_GRAMMARS))
    if asked is None and first + grammars + PLANNED_BYTES > rest // GRAMMAR_MOST:
        return 0, 0, 0  # a small bound is for requests without grammars, unless it is asked otherwise
    return first + grammars, PLANNED_BYTES, grammars


def options_of(limits: SchedulerConfig) -> dict[str, Any]:
    """The options of an engine whose scheduler has these limits."""
    return {
        "num_kv_blocks": limits.num_blocks,
        "block_size": limits.block_size,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": limits.max_model_len,
        "enable_prefix_caching": limits.enable_prefix_caching,
        "enable_chunked_prefill": limits.enable_chunked_prefill,
        "scheduling_policy": limits.policy,
        "overtake_ms": limits.overtake * 1e3,
    }


def _refusal(plan: MemoryPlan, needed: int, length: int, config: ResolvedConfig) -> str:
    short = plan.total + (needed - plan.limits.num_blocks) * plan.block_bytes
    advice = [f"raise --memory to at least {format_size(short * 1.01)}"]
    if length > MIN_MODEL_LEN:
        advice.append(f"lower --max-model-len ({length})")
    if config.max_num_batched_tokens > 64:
        advice.append(f"lower --max-num-batched-tokens ({config.max_num_batched_tokens})")
    if config.max_num_seqs > 1:
        advice.append(f"lower --max-num-seqs ({config.max_num_seqs})")
    if config.asked.adapters.enable_lora:
        pool = config.asked.adapters.lora_memory
        advice.append(
            f"lower --max-loras ({config.asked.adapters.max_loras})"
            if pool is None
            else f"lower --lora-memory ({format_size(pool)})"
        )
    if config.asked.limits.grammar_memory is not None:
        advice.append(f"lower --grammar-memory ({format_size(config.asked.limits.grammar_memory)})")
    if config.asked.limits.request_memory is not None:
        advice.append(f"lower --request-memory ({format_size(config.asked.limits.request_memory)})")
    if config.weights == "f32":
        advice.append("use --dtype bfloat16")
    if config.kv in FLOAT_KV:
        advice.append(f"use --kv-cache-dtype {'bfloat16' if config.kv == 'f32' else 'int8'}")
    parts = "; ".join(f"{name} {format_size(size)}" for name, size in plan.parts.items() if size)
    return (
        f"memory: {format_size(config.memory)} cannot hold one sequence of {length} tokens, which needs "
        f"{format_size(short)} ({parts}; KV for one sequence {format_size(needed * plan.block_bytes)}). "
        f"To fit: {', or '.join(advice)}."
    )
