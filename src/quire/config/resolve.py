"""The only place that decides defaults: asked + model + machine -> ResolvedConfig. Pure."""

from __future__ import annotations

from quire.cache_kinds import KV_DTYPES, LATE_KV, LATE_TOKENS
from quire.config.schema import INT8_GROUP, EngineConfig, ResolvedConfig
from quire.records import dataclass

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_QUANTIZED = {"auto": None, "none": None, "int8": "i8", "int4": "i4"}
DEFAULT_MEMORY_SHARE = 0.8
_SLOWER = 2  # prompts in float16 relative to bfloat16 on AVX-512, which multiplies bfloat16 pairs


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The model as `resolve` needs it: stored number format, trained and longest possible context in tokens.

    `whole`: all tokens of a text must be in one step.
    """

    dtype: str
    max_positions: int
    longest: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine as `resolve` needs it: cores, bytes that this process uses and can still allocate, forced ISA.

    `best_float16`: float16 weights are as fast as bfloat16 ones, because the machine converts them in one instruction
    and multiplies bfloat16 as float32 too. `nodes`: machines like this one that share the ranks of a model.
    """

    cores: int
    resident_memory: int
    available_memory: int
    isa: str = ""
    best_float16: bool = False
    nodes: int = 1


def resolve(asked: EngineConfig, model: ModelTraits, machine: MachineFacts) -> ResolvedConfig:
    """Decide all open choices. Raises ValueError naming a field that cannot be met."""
    notices: list[str] = []
    dtype = _dtype(asked, model.dtype, machine, notices)
    kv = dtype if asked.formats.kv_cache_dtype == "auto" else asked.formats.kv_cache_dtype
    length = asked.limits.max_model_len or model.max_positions
    if not 2 <= length <= model.longest:
        raise ValueError(f"max_model_len: {length} is not in [2, {model.longest}], the model's context")
    memory = asked.limits.memory
    if memory is None:
        memory = machine.resident_memory + int(DEFAULT_MEMORY_SHARE * machine.available_memory)
    batched = asked.limits.max_num_batched_tokens
    if model.whole:
        batched = max(batched, length)
    elif not asked.scheduler.enable_chunked_prefill and batched < length:
        # without chunks a prompt must fit into one step
        batched = length
        notices.append(
            f"max_num_batched_tokens was raised to {length}: without chunked prefill, a prompt must fit into one step"
        )
    block = asked.cache.block_size
    if KV_DTYPES[kv] in LATE_KV and block % LATE_TOKENS:
        block += LATE_TOKENS - block % LATE_TOKENS
        notices.append(
            f"block_size was raised to {block}: kv_cache_dtype = {kv} rounds {LATE_TOKENS} tokens together"
        )
        asked = asked.replace(block_size=block)
    if asked.parallel.tensor_parallel_reduce == "fast" and asked.parallel.tensor_parallel_size > 1:
        notices.append(
            "tensor_parallel_reduce fast: ranks add partial sums, so tokens and logprobs depend on their number"
        )
    quantized = _QUANTIZED[asked.formats.quantization]
    head = asked.formats.quantize_head
    head = ("int8" if quantized else "none") if head == "auto" else head
    size = asked.formats.quantization_group_size
    if quantized == "i8" and size is not None and size < INT8_GROUP:
        more = (1 + 2 / size) / (1 + 2 / INT8_GROUP) - 1
        notices.append(
            f"quantization_group_size: int8 in groups of {size} needs {more:.1%} more bytes for weights than groups of "
            f"{INT8_GROUP}, and prompts and large batches are slower (docs/quantization.md)"
        )
    return ResolvedConfig(
        asked=asked,
        weights=_DTYPES[dtype],
        kv=KV_DTYPES[kv],
        quantized=quantized,
        head="f32" if asked.formats.fp32_lm_head else _QUANTIZED[head],
        memory=memory,
        threads=asked.execution.threads or max(1, machine.cores * machine.nodes // asked.parallel.ranks),
        nodes=machine.nodes,
        isa=machine.isa,
        max_model_len=length,
        shrink_model_len=asked.limits.max_model_len is None,
        max_num_seqs=asked.limits.max_num_seqs,
        max_num_batched_tokens=max(batched, asked.limits.max_num_seqs),
        speculation=asked.speculation.chosen(),
        notices=tuple(notices),
    )


def _dtype(asked: EngineConfig, stored: str, machine: MachineFacts, notices: list[str]) -> str:
    """Choose the number format of the weights, and note its effect on predictions and prompts."""
    dtype = asked.formats.dtype
    if dtype == "auto":
        dtype = "bfloat16" if stored == "float16" and not machine.best_float16 else stored
    if asked.formats.quantization in {"int8", "int4"}:  # then quantization decides loss and speed
        return dtype
    if dtype != stored == "float16" and asked.formats.dtype == "auto":
        notices.append(
            "the float16 checkpoint is rounded to bfloat16, which changes predictions (KL 3e-4 on quire-mini); "
            f"--dtype float16 changes them far less (KL 2e-6), but prompts take about {_SLOWER} times as long"
        )
    if dtype == "float16" and not machine.best_float16:
        notices.append(
            f"float16 weights are multiplied as float32: prompts take about {_SLOWER} times as long as in bfloat16"
        )
    return dtype
