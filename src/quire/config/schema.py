"""The options of an engine. None means that config.resolve decides."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

_COUNTS = (
    "memory", "max_model_len", "threads", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks",
    "weight_cache_size", "request_memory",
)  # fmt: skip
# Larger values gain nothing and overflow the arrays of a step.
_MOST = {
    "threads": 1024, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**20, "block_size": 2**16,
    "num_kv_blocks": 2**31 - 1,
}  # fmt: skip
SIZES = ("memory", "request_memory", "weight_cache_size")  # fields in bytes, written like 6GiB
# An engine that waits for a batch looks idle; if it waited longer, it would look as if it hung.
MAX_BATCH_WAIT_MS = 1000.0
GROUP_SIZES = (32, 64, 128)  # for weights rounded at load
INT8_GROUP, INT4_GROUP = 128, 32  # defaults
# Methods of quantized checkpoints: value of `quantization` -> name in messages. They only state what a checkpoint must
# be.
STORED = {
    "gptq": "GPTQ", "awq": "AWQ", "auto-round": "AutoRound", "compressed-tensors": "compressed-tensors", "fp8": "FP8",
    "fbgemm_fp8": "FBGEMM FP8", "modelopt": "ModelOpt FP8", "bitsandbytes": "bitsandbytes", "hqq": "HQQ",
    "mxfp4": "MXFP4", "gguf": "GGUF",
}  # fmt: skip
_DTYPES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32",
}  # fmt: skip
ATTENTION_BACKENDS = {"native": "native", "torch": "eager"}  # of each executor
# Names of values in vLLM, PyTorch and llama.cpp: field -> {name: value}.
ALIASES: dict[str, dict[str, str]] = {
    "dtype": _DTYPES,
    "kv_cache_dtype": _DTYPES,
    "quantization": {"gptq_marlin": "gptq", "awq_marlin": "awq", "intel/auto-round": "auto-round"},
    "load_format": {"dummy": "random"},
}
# Sections of the options: first field -> title.
SUBJECTS = {
    "dtype": "number formats",
    "memory": "memory and limits",
    "block_size": "KV cache",
    "enable_chunked_prefill": "scheduling",
    "load_format": "loading",
    "seed": "execution",
}


def option(default: Any, text: str, *, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """A config field with the metadata of its command-line option."""
    return field(default=default, metadata={"help": text, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The requested engine. Field names are the long options of the command line, with vLLM's names."""

    dtype: str = option(
        "auto",
        "number format of the weights; auto: float32 for float32 checkpoints, float16 for float16 ones if the "
        "processor multiplies bfloat16 no faster (AVX2), else bfloat16; float16: stored exactly, products in float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto: as --dtype; int8: half of bfloat16, one scale per token and head",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    quantization: str = option(
        "auto",
        "format in which linear weights are computed; auto: as stored, in the codes of a quantized checkpoint; none: "
        "floats; int8 or int4: rounded at load, one scale per group of inputs. Inputs of quantized weights are rounded "
        "to int8. The name of a quantization method means auto, and must match the checkpoint",
        choices=("auto", "none", "int8", "int4", *STORED),
    )
    quantization_group_size: int | None = option(
        None,
        "input features that share a scale in weights rounded at load: 32, 64 or 128 (default: 128 in int8, 32 in "
        "int4); smaller groups are more accurate, and slower",
        metavar="N",
    )
    quantize_head: str = option(
        "auto",
        "format of the head and a tied embedding; auto: int8 if the other weights are quantized",
        choices=("auto", "int8", "int4", "none"),
    )
    fp32_lm_head: bool = option(
        False,
        "compute the head, and with it a tied embedding, in float32, which does not round logits; it takes twice the "
        "memory of a bfloat16 head, and each decoded token reads all of it",
    )
    memory: int | None = option(
        None,
        "hard bound on the memory of all processes, like 6GiB (default: 80%% of the available memory)",
        metavar="SIZE",
    )
    request_memory: int | None = option(
        None,
        "part of --memory for requests: bodies, prompts, answers, logprobs (default: an eighth of the memory left by "
        "weights, from 8 MiB to 1 GiB)",
        metavar="SIZE",
    )
    max_model_len: int | None = option(
        None,
        "longest sequence in tokens, prompt and output (default: the model's, or the longest that fits)",
        metavar="N",
    )
    max_num_seqs: int = option(64, "maximum number of sequences that run at once", metavar="N")
    max_num_batched_tokens: int = option(512, "maximum number of tokens per step", metavar="N")
    block_size: int = option(16, "tokens per KV block, a multiple of 16", metavar="N")
    num_kv_blocks: int | None = option(
        None, "number of KV blocks, within the memory bound (default: as many as fit)", metavar="N"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt prefixes")
    enable_chunked_prefill: bool = option(
        True, "compute long prompts in chunks, along with running sequences"
    )
    scheduling_policy: str = option(
        "fcfs", "order of waiting requests; priority: lower numbers first", choices=("fcfs", "priority")
    )
    batching: str = option(
        "continuous",
        "dynamic: collect a batch and run it to its end before the next one; for comparison, never faster",
        choices=("continuous", "dynamic"),
    )
    batch_wait_ms: float = option(
        50.0, "dynamic batching: start an incomplete batch after this time", metavar="MS"
    )
    load_format: str = option(
        "auto",
        "random: seeded random weights for config.json, for benchmarks; safetensors or gguf: like auto, but the "
        "model must have that format",
        choices=("auto", "random", "safetensors", "gguf"),
    )
    weight_cache: str = option(
        "on",
        "cache packed weights on disk for the next start; on: the checkpoint is identified by path, size, time and "
        "sampled bytes; content: by all its bytes, wherever it is",
        choices=("on", "content", "off"),
    )
    weight_cache_dir: str | None = option(
        None,
        "folder of the packed weights (default: weights/ in QUIRE_CACHE_DIR or the user's cache)",
        metavar="DIR",
    )
    weight_cache_size: int = option(
        64 * 2**30,
        "limit of the cached bytes; the least recently used copies are removed first",
        metavar="SIZE",
    )
    seed: int = option(0, "seed of random weights and of requests without a seed", metavar="N")
    threads: int | None = option(None, "threads of the kernels (default: all usable cores)", metavar="N")
    executor: str = option(
        "native", "native kernels, or the torch reference (needs torch)", choices=("native", "torch")
    )
    device: str = option("cpu", "device of the torch executor", metavar="NAME")
    attention_backend: str = option(
        "auto",
        "how attention is computed; each executor has one way: native, the native kernels, the same bits in any batch; "
        "eager, matrix products in float32 row by row, in the torch executor; auto: that of the executor",
        choices=("auto", *ATTENTION_BACKENDS.values()),
    )

    def __post_init__(self) -> None:
        for name, values in ALIASES.items():
            asked = getattr(self, name)
            object.__setattr__(self, name, values.get(asked, asked))
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"{f.name}: {value!r} is not one of {', '.join(choices)}")
        self._check_executor()
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}: {value!r} is not a positive integer")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name}: {value} exceeds the limit of {most}")
        if not 0 <= self.batch_wait_ms <= MAX_BATCH_WAIT_MS:
            raise ValueError(
                f"batch_wait_ms: {self.batch_wait_ms} is not between 0 and {MAX_BATCH_WAIT_MS:g}"
            )
        if self.fp32_lm_head and self.quantize_head in {"int8", "int4"}:
            raise ValueError(f"fp32_lm_head: cannot be combined with quantize_head = {self.quantize_head}")
        if self.quantization_group_size not in {None, *GROUP_SIZES}:
            raise ValueError(
                f"quantization_group_size: {self.quantization_group_size!r} is not one of "
                f"{', '.join(map(str, GROUP_SIZES))}"
            )
        if self.block_size < 16 or self.block_size % 16:
            raise ValueError(f"block_size: {self.block_size} is not a positive multiple of 16")

    def _check_executor(self) -> None:
        if self.device != "cpu" and self.executor == "native":
            raise ValueError(
                f"device: {self.device!r} needs --executor torch; the native executor runs on the CPU"
            )
        backend = ATTENTION_BACKENDS[self.executor]
        if self.attention_backend not in {"auto", backend}:
            raise ValueError(
                f"attention_backend: {self.attention_backend!r} is not a backend of the {self.executor} executor, "
                f"which has {backend!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The config from which the engine is built, with all choices made. `asked` is kept for reports."""

    asked: EngineConfig
    weights: str  # "f32", "bf16" or "f16"
    kv: str
    quantized: str | None  # "i8", "i4" or None: format to which linear weights of layers are rounded
    head: str | None  # the same for the head and a tied embedding, or "f32"
    memory: int
    threads: int
    isa: str  # "" is the best one of the machine
    max_model_len: int
    shrink_model_len: bool  # the length is a default and may be reduced until it fits
    max_num_seqs: int
    max_num_batched_tokens: int
    notices: tuple[str, ...] = ()
