"""The options of an engine, in groups. None means that config.resolve decides.

A new option is a field of a group; a new group is a class and a field of EngineConfig. For users all options have flat
names: on the command line, in the environment, in config files and as arguments of LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, field, fields, replace
from typing import Any

from quire.cache_kinds import KV_DTYPES, KVType
from quire.config.cache import CacheOptions
from quire.config.option import check_options, option
from quire.config.parallel import ParallelOptions
from quire.config.speculative import ACCEPTANCES, SpeculativeConfig, parse_speculative_config
from quire.objectives import class_policies, parse_classes, parse_degrade
from quire.records import dataclass

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
# core.policy says what each part means
POLICIES = (
    "fcfs", "sjf", "lpm", "edf", "priority", "priority+sjf", "priority+lpm", "priority+edf", "fair", "fair+sjf",
    "fair+edf", "priority+fair", "priority+fair+sjf", "priority+fair+edf",
)  # fmt: skip
LORA_TARGETS = (
    "embed_tokens",
    "lm_head",
    "experts",
    "modules_to_save",
)  # what adapters may change, if it is asked
DEFAULT_LORA_RANK = 16
# Linears that vLLM and SGLang list one by one: adapters may always change them.
LORA_LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
)  # fmt: skip
TASKS = ("auto", "generate", "embed", "classify", "score")
ATTENTION_BACKENDS = {"native": "native", "torch": "eager"}  # of each executor


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """Number formats of weights, cache and head."""

    dtype: str = option(
        "auto",
        "number format of the weights; auto: float32 for float32 checkpoints, float16 for float16 ones if the "
        "processor multiplies bfloat16 no faster (AVX2), else bfloat16; float16: stored exactly, products in float32",
        choices=("auto", "float32", "bfloat16", "float16"),
        aliases=_DTYPES,
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache; auto: as --dtype; int8 and fp8: half of bfloat16, int4, kivi4, kivi2 and "
        "kvquant3: a quarter to a sixth (docs/kv_cache.md); fp8: fp8_e4m3; kvquant3 needs kv_cache_scales",
        choices=("auto", *KV_DTYPES),
        aliases={**_DTYPES, "fp8": "fp8_e4m3"},
    )
    kv_cache_scales: str | None = option(
        None,
        "safetensors file with the scales of an fp8 cache, as `quire calibrate` writes it (default: those of the "
        "checkpoint, or 1), or with the levels of a kvquant3 cache",
        metavar="FILE",
    )
    kv_cache_quality: str = option(
        "check",
        "what commands do about a kv_cache_dtype that rounds; check: measure its loss once for a model, print it at "
        "each start, and refuse one that is too large; force: accept it; off: do not measure",
        choices=("check", "force", "off"),
    )
    quantization: str = option(
        "auto",
        "format in which linear weights are computed; auto: as stored, in the codes of a quantized checkpoint; none: "
        "floats; int8 or int4: rounded at load, one scale per group of inputs. Inputs of quantized weights are rounded "
        "to int8. The name of a quantization method means auto, and must match the checkpoint",
        choices=("auto", "none", "int8", "int4", *STORED),
        aliases={"gptq_marlin": "gptq", "awq_marlin": "awq", "intel/auto-round": "auto-round"},
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

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_cache_scales and self.kv_cache_dtype not in {"fp8_e4m3", "fp8_e5m2", "kvquant3"}:
            raise ValueError(
                f"kv_cache_scales: scales are of an fp8 or kvquant3 cache, but kv_cache_dtype is {self.kv_cache_dtype}"
            )
        if self.fp32_lm_head and self.quantize_head in {"int8", "int4"}:
            raise ValueError(f"fp32_lm_head: cannot be combined with quantize_head = {self.quantize_head}")
        if self.quantization_group_size not in {None, *GROUP_SIZES}:
            raise ValueError(
                f"quantization_group_size: {self.quantization_group_size!r} is not one of "
                f"{', '.join(map(str, GROUP_SIZES))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Memory, and how much runs at once."""

    memory: int | None = option(
        None,
        "hard bound on the memory of all processes, like 6GiB (default: 80%% of the available memory)",
        metavar="SIZE",
        count=True,
        size=True,
    )
    request_memory: int | None = option(
        None,
        "part of --memory for requests: bodies, prompts, answers, logprobs (default: an eighth of the memory left by "
        "weights, from 8 MiB to 1 GiB)",
        metavar="SIZE",
        count=True,
        size=True,
    )
    grammar_memory: int | None = option(
        None,
        "part of --memory for compiled grammars; one for which it has no room waits (default: a sixteenth of the "
        "memory left by weights, from 8 MiB to 256 MiB; none under a small bound)",
        metavar="SIZE",
        count=True,
        size=True,
    )
    max_model_len: int | None = option(
        None,
        "longest sequence in tokens, prompt and output (default: the model's, or the longest that fits)",
        metavar="N",
        count=True,
    )
    max_num_seqs: int = option(
        64, "maximum number of sequences that run at once", metavar="N", count=True, most=2**16
    )
    max_num_batched_tokens: int = option(
        512, "maximum number of tokens per step", metavar="N", count=True, most=2**20
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What runs next."""

    enable_chunked_prefill: bool = option(
        True, "compute long prompts in chunks, along with running sequences"
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of waiting requests; priority: lower numbers first; fair: equal shares of API keys; sjf: the least "
        "predicted work first; lpm: the longest cached prefix first; edf: the earliest deadline first; a combination "
        "like priority+fair+sjf goes by its first part, then the next; classes of --slo may have others, like "
        "edf,batch=sjf",
        metavar="POLICY",
    )
    overtake_ms: float = option(
        30_000.0,
        "sjf, lpm, edf: a request is overtaken only by those that arrive less than this time after it",
        metavar="MS",
    )
    slo: tuple[str, ...] = option(
        (),
        "classes of service and their levels, the most urgent first, like interactive:ttft=500ms,tpot=50ms batch: ; "
        "requests name theirs in service_tier (default: none)",
        metavar="NAME:LEVELS",
    )
    admission: str = option(
        "predict",
        "predict: also refuse requests whose deadline or service level cannot be kept, by the cost model of steps; "
        "queue: only those for which the queue has no room",
        choices=("predict", "queue"),
    )
    degrade: tuple[str, ...] = option(
        (),
        "steps in which a saturated server gives less, in order, each taken back by itself: speculation=N: at most N "
        "drafts a sequence; max_tokens=N: shorter answers; shed: no requests of the last class (or of a priority above "
        "0); model=NAME: another model of this server answers (default: none)",
        metavar="STEP",
    )
    degrade_after_ms: float = option(
        1000.0,
        "a step is entered when requests have waited for longer than the TTFT of their class, or this without one, for "
        "this time, and left when they have waited for less than half of that for five times as long",
        metavar="MS",
    )
    batching: str = option(
        "continuous",
        "for comparison, never faster; dynamic: collect a batch for --batch-wait-ms and run it to its end before the "
        "next one; static: wait until max_num_seqs are there, or a second",
        choices=("continuous", "dynamic", "static"),
    )
    batch_wait_ms: float = option(
        50.0, "dynamic batching: start an incomplete batch after this time", metavar="MS"
    )

    def __post_init__(self) -> None:
        check_options(self)
        class_policies(self.scheduling_policy, parse_classes(self.slo), POLICIES)
        parse_degrade(self.degrade)
        if not 0 < self.degrade_after_ms < float("inf"):
            raise ValueError(
                f"degrade_after_ms: {self.degrade_after_ms} is not a positive number of milliseconds"
            )
        if not 0 < self.overtake_ms < float("inf"):
            raise ValueError(f"overtake_ms: {self.overtake_ms} is not a positive number of milliseconds")
        if not 0 <= self.batch_wait_ms <= MAX_BATCH_WAIT_MS:
            raise ValueError(
                f"batch_wait_ms: {self.batch_wait_ms} is not between 0 and {MAX_BATCH_WAIT_MS:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """Where weights come from."""

    load_format: str = option(
        "auto",
        "random: seeded random weights for config.json, for benchmarks; safetensors or gguf: like auto, but the "
        "model must have that format",
        choices=("auto", "random", "safetensors", "gguf"),
        aliases={"dummy": "random"},
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
        count=True,
        size=True,
    )
    weight_memory: int | None = option(
        None,
        "bytes of weights that are in memory at once; the others are read from the packed weights in every step that "
        "needs them: for models larger than memory (default: all)",
        metavar="SIZE",
        count=True,
        size=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.weight_memory is not None and (self.weight_cache == "off" or self.load_format == "random"):
            raise ValueError(
                "weight_memory: the others are read from packed weights, which weight_cache off and load_format random "
                "do not have"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """What computes."""

    task: str = option(
        "auto",
        "what the model is for; embed: a vector for a text; classify: its labels; score: how well two texts go "
        "together; auto: that of the checkpoint, which for one with a language model's head is generate",
        choices=TASKS,
        aliases={"embedding": "embed", "reward": "classify", "rerank": "score"},
    )
    pooling: str = option(
        "auto",
        "embed: which of the last hidden states are the vector: their mean, the first (cls) or the last; auto: as the "
        "checkpoint says, else mean for encoders and last for decoders",
        choices=("auto", "mean", "cls", "last"),
    )
    seed: int = option(0, "seed of random weights and of requests without a seed", metavar="N")
    threads: int | None = option(
        None,
        "threads of the kernels, in each rank (default: all usable cores)",
        metavar="N",
        count=True,
        most=1024,
    )
    executor: str = option(
        "native", "native kernels, or the torch reference (needs torch)", choices=("native", "torch")
    )
    device: str = option("cpu", "device of the torch executor", metavar="NAME")
    enable_prompt_embeds: bool = option(
        False, "take rows of embeddings in place of a prompt's tokens (prompt_embeds)"
    )
    jump_forward: bool = option(
        True, "add tokens that a grammar forces without sampling them; the same tokens, in fewer steps"
    )
    attention_backend: str = option(
        "auto",
        "how attention is computed; each executor has one way: native, the native kernels, the same bits in any batch; "
        "eager, matrix products in float32 row by row, in the torch executor; auto: that of the executor",
        choices=("auto", *ATTENTION_BACKENDS.values()),
    )

    def __post_init__(self) -> None:
        check_options(self)
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
class AdapterOptions:
    """Adapters of low rank (LoRA), many of which are computed in one step."""

    enable_lora: bool = option(False, "take adapters of low rank (LoRA)")
    max_loras: int = option(
        4,
        "adapters that can run at once; requests of others wait",
        metavar="N",
        count=True,
        most=1024,
    )
    max_lora_rank: int | None = option(
        None, "largest rank of an adapter (default: that of the adapters given at start, at least 16)", metavar="N",
        count=True, most=256,
    )  # fmt: skip
    lora_memory: int | None = option(
        None,
        "memory of the pool that adapters run from, part of --memory; each takes what its ranks and modules need, and "
        "those used least recently make room (default: enough for --max-loras of the largest)",
        metavar="SIZE",
        count=True,
        size=True,
    )
    max_cpu_loras: int | None = option(
        None,
        "adapters whose weights stay in memory as they were read (default: none; they are read from their files again, "
        "which the page cache holds)",
        metavar="N",
        count=True,
        most=2**16,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "what adapters may change besides linears of attention, feed-forwards and routers: embed_tokens, lm_head, "
        "experts (of low rank), modules_to_save (whole embeddings and heads), or all (default: what the adapters given "
        "at start change)",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "lora_target_modules", tuple(self.lora_target_modules))
        known = (*LORA_TARGETS, "all")
        for name in self.lora_target_modules:
            if name not in known and name not in LORA_LINEARS:
                raise ValueError(f"lora_target_modules: {name!r} is not one of {', '.join(known)}")

    @property
    def rank(self) -> int:
        """The largest rank."""
        return self.max_lora_rank or DEFAULT_LORA_RANK

    def has_room(self, target: str) -> bool:
        """Whether adapters may change one of LORA_TARGETS."""
        return "all" in self.lora_target_modules or target in self.lora_target_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Drafts: guesses at the next tokens, which one step checks together."""

    speculate: str = option(
        "off",
        "method of speculative decoding; ngram: what followed when the latest tokens stood in the text before; self: "
        "the first layers draft; lookahead: guesses that become better step by step. The answers are those without "
        "it, to the last bit",
        choices=("off", "ngram", "self", "lookahead"),
    )
    draft_model: str | None = option(
        None, "a smaller model with the same vocabulary drafts: a folder, or a GGUF file", metavar="MODEL"
    )
    speculative_config: str | Mapping[str, Any] | None = option(
        None,
        "the method with its settings, as a JSON object; see docs/speculation.md",
        metavar="JSON",
    )
    speculation_acceptance: str = option(
        "same",
        "which drafts are right; same: those equal to the token that is sampled anyway, so that answers do not change; "
        "rejection: by modified rejection sampling, where answers have the same distribution but depend on the drafts "
        "and the load; typical: also those that are likely enough (lossy: other answers than without)",
        choices=ACCEPTANCES,
    )

    def __post_init__(self) -> None:
        check_options(self)
        given = [self.speculative_config is not None, self.speculate != "off", self.draft_model is not None]
        if sum(given) > 1:
            raise ValueError("speculate, draft_model, speculative_config: only one of them can be given")
        self.chosen()

    def chosen(self) -> SpeculativeConfig | None:
        """The method and its settings; None for no speculation. Raises ValueError naming the field."""
        found = None
        if self.speculative_config is not None:
            found = parse_speculative_config(self.speculative_config)
        elif self.draft_model is not None:
            found = SpeculativeConfig(method="draft_model", model=self.draft_model)
        elif self.speculate != "off":
            found = SpeculativeConfig(method=self.speculate)
        acceptance = self.speculation_acceptance
        if acceptance == "same":
            return found
        if found is None:
            raise ValueError(f"speculation_acceptance: {acceptance} needs a method of speculation")
        if found.acceptance not in ("same", acceptance):
            raise ValueError(
                f"speculation_acceptance: {acceptance} is not {found.acceptance} of speculative_config"
            )
        return replace(found, acceptance=acceptance)

    def acceptance(self) -> str:
        """Which drafts are right; "same" if there are none."""
        chosen = self.chosen()
        return "same" if chosen is None else chosen.acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The log of steps and requests."""

    record: str | None = option(
        None,
        "write a log of all steps, requests and decisions, for quire explain and quire replay; no texts and no tokens "
        "are in it (default: none)",
        metavar="FILE",
    )
    record_size: int = option(
        256 * 2**20,
        "most bytes of the log and of the file before it, FILE.1",
        metavar="SIZE",
        count=True,
        size=True,
    )
    record_prompts: bool = option(False, "the log has the token ids of prompts and answers, too")

    def __post_init__(self) -> None:
        check_options(self)
        if self.record_prompts and self.record is None:
            raise ValueError("record_prompts: needs record, the file that they are written to")
        if self.record_size < 2**16:
            raise ValueError(f"record_size: {self.record_size} bytes are below the minimum of {2**16}")


def _group(title: str, kind: type[Any]) -> Any:
    """A group of options under a title."""
    return field(default_factory=kind, metadata={"title": title, "kind": kind})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The requested engine. Made from flat options: EngineConfig(memory=6 * 2**30, block_size=32).

    Names of options are the long options of the command line, with vLLM's names. Raises ValueError naming the option
    that is out of range.
    """

    formats: FormatOptions = _group("number formats", FormatOptions)
    limits: LimitOptions = _group("memory and limits", LimitOptions)
    cache: CacheOptions = _group("KV cache", CacheOptions)
    scheduler: SchedulerOptions = _group("scheduling", SchedulerOptions)
    loading: LoadingOptions = _group("loading", LoadingOptions)
    execution: ExecutionOptions = _group("execution", ExecutionOptions)
    speculation: SpeculationOptions = _group("speculation", SpeculationOptions)
    adapters: AdapterOptions = _group("adapters", AdapterOptions)
    parallel: ParallelOptions = _group("parallelism", ParallelOptions)
    recording: RecordOptions = _group("recording", RecordOptions)
    # Its number among replicas that hold the experts between them, and how many there are: no option, see of_replica.
    replica: tuple[int, int] = (0, 1)

    def __init__(self, *, replica: tuple[int, int] = (0, 1), **options: Any) -> None:
        unknown = options.keys() - OPTIONS.keys()
        if unknown:
            raise TypeError(f"{min(unknown)} is not an option of an engine")
        for name, kind in GROUPS.items():
            own = {f.name: options[f.name] for f in fields(kind) if f.name in options}
            object.__setattr__(self, name, kind(**own))
        object.__setattr__(self, "replica", replica)

    def values(self) -> dict[str, Any]:
        """All options by their flat names."""
        groups = [getattr(self, name) for name in GROUPS]
        return {f.name: getattr(group, f.name) for group in groups for f in fields(group)}

    def replace(self, **changes: Any) -> EngineConfig:
        """The same with other values of some options."""
        return EngineConfig(replica=self.replica, **{**self.values(), **changes})

    @property
    def shares_experts(self) -> bool:
        """Whether replicas hold the experts of the model between them."""
        parallel, executor = self.parallel, self.execution.executor
        return parallel.enable_expert_parallel and parallel.data_parallel_size > 1 and executor == "native"

    def of_replica(self, number: int) -> EngineConfig:
        """What one of the replicas is made of: all that was asked for, and where they share experts, its number."""
        replica = (number, self.parallel.data_parallel_size) if self.shares_experts else (0, 1)
        return EngineConfig(replica=replica, **{**self.values(), "data_parallel_size": 1})


_GROUPS: tuple[Field[Any], ...] = tuple(each for each in fields(EngineConfig) if "kind" in each.metadata)
GROUPS: dict[str, type[Any]] = {group.name: group.metadata["kind"] for group in _GROUPS}
OPTIONS: dict[str, Field[Any]] = {f.name: f for kind in GROUPS.values() for f in fields(kind)}
# Sections of the options: first option -> title.
SUBJECTS = {fields(GROUPS[group.name])[0].name: group.metadata["title"] for group in _GROUPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The config from which the engine is built, with all choices made. `asked` is kept for reports."""

    asked: EngineConfig
    weights: str  # "f32", "bf16" or "f16"
    kv: KVType
    quantized: str | None  # "i8", "i4" or None: format to which linear weights of layers are rounded
    head: str | None  # the same for the head and a tied embedding, or "f32"
    memory: int
    threads: int
    isa: str  # "" is the best one of the machine
    max_model_len: int
    shrink_model_len: bool  # the length is a default and may be reduced until it fits
    max_num_seqs: int
    max_num_batched_tokens: int
    speculation: SpeculativeConfig | None
    notices: tuple[str, ...] = ()
    nodes: int = 1  # hosts that the ranks are on; bytes and threads are of each
