"""The one place where defaults are decided: asked + model + machine -> ResolvedConfig. Pure."""

from __future__ import annotations

from quire.config.schema import EngineConfig, ResolvedConfig
from quire.records import dataclass

_DTYPES = {"float32": "f32", "bfloat16": "bf16"}
_QUANTIZED = {"auto": None, "none": None, "int8": "i8", "int4": "i4"}
_KV_DTYPES = {**_DTYPES, "int8": "i8"}
DEFAULT_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolving needs of a model: stored number format, trained and longest possible context in tokens."""

    dtype: str
    max_positions: int
    longest: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What resolving needs of the machine: cores, bytes this process holds and could still take, forced ISA."""

    cores: int
    resident_memory: int
    available_memory: int
    isa: str = ""


def resolve(asked: EngineConfig, model: ModelFacts, machine: MachineFacts) -> ResolvedConfig:
    """Decide everything that was left open. Raises ValueError naming the field that cannot be met."""
    notices = []
    dtype = asked.dtype
    if dtype == "auto":
        dtype = "float32" if model.dtype == "float32" else "bfloat16"
        if model.dtype == "float16":
            notices.append(
                "the checkpoint is float16: weights are rounded to bfloat16 (--dtype float32 keeps them exact)"
            )
    kv = dtype if asked.kv_cache_dtype == "auto" else asked.kv_cache_dtype
    length = asked.max_model_len or model.max_positions
    if not 2 <= length <= model.longest:
        raise ValueError(f"max_model_len: {length} is not in [2, {model.longest}], the model's context")
    memory = asked.memory
    if memory is None:
        memory = machine.resident_memory + int(DEFAULT_MEMORY_SHARE * machine.available_memory)
    batched = asked.max_num_batched_tokens
    if not asked.enable_chunked_prefill and batched < length:
        # without chunks a prompt must fit one step
        batched = length
        notices.append(
            f"max_num_batched_tokens raised to {length}: without chunked prefill a prompt runs whole"
        )
    quantized = _QUANTIZED[asked.quantization]
    return ResolvedConfig(
        asked=asked,
        weights=_DTYPES[dtype],
        kv=_KV_DTYPES[kv],
        quantized=quantized,
        head=("i8" if quantized else None)
        if asked.quantize_head == "auto"
        else _QUANTIZED[asked.quantize_head],
        memory=memory,
        threads=asked.threads or machine.cores,
        isa=machine.isa,
        max_model_len=length,
        shrink_model_len=asked.max_model_len is None,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=max(batched, asked.max_num_seqs),
        notices=tuple(notices),
    )
