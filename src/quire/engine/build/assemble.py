"""From a checkpoint folder to a running engine: read, lower, plan memory, load, bind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire._native import supported_isas
from quire.cache_kinds import FP8_KV, StateGroup
from quire.config import env
from quire.config.launched import node_count
from quire.config.resolve import MachineFacts, ModelTraits, resolve
from quire.config.schema import (
    INT4_GROUP,
    INT8_GROUP,
    LORA_TARGETS,
    STORED,
    AdapterOptions,
    EngineConfig,
    ResolvedConfig,
)
from quire.config.speculative import WITH_MODEL
from quire.core.coming_blocks import Arrivals
from quire.core.controller import StepController
from quire.engine.build.budget import MemoryPlan, plan_memory
from quire.engine.build.cache_codes import kv_codes
from quire.engine.build.core_parts import make_gate, make_scheduler, make_swap_space, make_worker
from quire.engine.build.disk_tiers import make_tiers
from quire.engine.build.drafts import (
    Draft,
    apart,
    check_vocabulary,
    draft_options,
    feature_draft,
    in_one_group,
    read_spec,
    rounded_draft,
    within,
)
from quire.engine.build.kept_costs import keep_costs, load_costs
from quire.engine.build.kept_peaks import load_peaks
from quire.engine.build.later_tokenizer import LaterTokenizer, coming_tokenizer, tokenizer_for_grammars
from quire.engine.build.load_weights import (
    Origin,
    WeightsReport,
    check_paging,
    load_weights,
    modules_of,
    weight_files,
    weights_fingerprint,
)
from quire.engine.build.log_file import make_recorder
from quire.engine.build.opening import Model, kept_files, open_model
from quire.engine.build.rank_processes import (
    RankProcesses,
    leading_plan,
    other_processes,
    rank_plans,
    shared_experts,
    started_ranks,
)
from quire.engine.build.sparse_formats import sparse_formats
from quire.engine.build.tasks import check_pooling_options, for_task
from quire.engine.core import EngineCore, Grammars
from quire.executor.base import Executor, ExecutorKind, Limits
from quire.executor.expert_replicas import ExpertReplicas
from quire.executor.kinds import executor_kind, import_executor
from quire.executor.ranked import leading_rank
from quire.executor.stage_times import StageTimes
from quire.loader import (
    Checkpoint,
    LoadRules,
    Source,
)
from quire.loader.kv_scales import read_scales, read_scales_file
from quire.loader.source import CodesSource
from quire.objectives import parse_classes
from quire.program.cost import Row, step_cost
from quire.program.formats import DType, Groups, HeadScales, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.lower_draft import trimmed
from quire.program.lowering import LoraRoom
from quire.program.memory import kv_block_bytes, param_bytes
from quire.program.program import Program
from quire.program.ranks import RankPlan
from quire.program.stages import stage_layers
from quire.program.step_work import StepWork
from quire.records import dataclass
from quire.spec import Attention
from quire.spec.draft import DraftSpec, Features, MedusaSpec
from quire.speculate.build import make_speculation
from quire.types import CheckpointError, MemoryBudgetError
from quire.util.numa import rank_cores, stay_on, staying_on
from quire.util.platform import available_memory, resident_exactly, total_memory, usable_cores
from quire.util.sizes import format_size
from quire.util.startup_spans import Startup

if TYPE_CHECKING:
    from quire.loader.load import Progress
    from quire.lora.adapter_service import AdapterService
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Planned:
    """What is decided before anything large is allocated.

    `program` is what this process computes, `programs` are those of all ranks; none if there is one.
    """

    model: Model
    config: ResolvedConfig
    program: Program
    programs: tuple[Program, ...]
    draft: Draft | None
    kind: ExecutorKind
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Built:
    """A bound engine, and how it was built."""

    model: Model
    config: ResolvedConfig
    program: Program
    plan: MemoryPlan
    executor: Executor
    core: EngineCore
    weights: WeightsReport
    draft: Executor | None = None  # of a draft model
    ranks: RankProcesses | None = None
    sharing: ExpertReplicas | None = None  # experts with other replicas

    def close(self) -> None:
        """Free the memory of the executors, and keep what was learned of their speed, and blocks on the disk."""
        if self.core.tiers is not None:
            self.core.tiers.close()
        if self.sharing is None:  # steps that wait for those of other replicas say little
            keep_costs(self.core.costs, self.model.folder, self.config)
        if self.core.recorder is not None:
            self.core.recorder.close()
        if self.core.adapters is not None:
            self.core.adapters.close()
        if self.draft is not None:
            self.draft.close()
        self.executor.close()
        if self.ranks is not None:
            self.ranks.close()

    def give_pages(self) -> None:
        """Give back pages that can be had again; see Runnable.give_pages."""
        for each in (self.executor, self.draft):
            if each is not None:
                each.give_pages()

    def areas(self) -> list[tuple[str, int, int]]:
        """The large parts of the executors' memory; see Inspectable.areas."""
        return [*self.executor.areas(), *(self.draft.areas() if self.draft else ())]

    @property
    def embed_dim(self) -> int:
        """Numbers in a row of embeddings that a request may send in place of a token; 0 if it may not."""
        program = self.ranks.programs[0] if self.ranks else self.program
        entry = program.entry
        enabled = self.config.asked.execution.enable_prompt_embeds and not self.program.pools
        return program.buffer(entry.buffer).cols if enabled and entry is not None else 0

    def notices(self) -> list[str]:
        """What the user should know about how the model runs."""
        found = [*self.model.facts.notices, *self.config.notices]
        if self.weights.dequantized:
            stored = ", ".join(self.weights.dequantized)
            computed = self.config.quantized or self.config.weights
            found.append(f"weights stored as {stored} are dequantized when loaded; computing uses {computed}")
        limit, asked = self.plan.limits.max_len, self.config.max_model_len
        if limit < asked:
            found.append(f"context limited to {limit} tokens: {asked} do not fit the memory bound")
        return [*found, *self.weights.notices]


@contextmanager
def open_weights(model: Model) -> Iterator[Source]:
    """The weights of a model by name; the files of a folder are closed on exit."""
    if model.gguf is not None:
        yield model.gguf.weights()
        return
    with Checkpoint(model.folder, modules=modules_of(model)) as checkpoint:
        quantization = model.facts.quantization
        if quantization is None:
            yield checkpoint
            return
        from quire.loader import QuantizedSource

        yield QuantizedSource(checkpoint, quantization)


def weight_origin(model: Model) -> Origin:
    """Where the weights of a model are read from."""
    return Origin(
        model.folder,
        LoadRules.of(model.facts.spec, quantized=model.facts.quantization is not None),
        lambda: weight_files(model),
        lambda: open_weights(model),
    )


def load_rank(
    model: Model,
    program: Program,
    config: ResolvedConfig,
    executor: Executor,
    progress: Progress | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> WeightsReport:
    """`load_weights` of the part of a model that a program computes."""
    origin = weight_origin(model)
    if program.plan.ranks > 1 or program.plan.shares_experts:
        whole = choose(model, config.asked, machine_facts())[1]
        origin = replace(origin, rules=origin.rules.of_rank(whole.params))
    return load_weights(origin, program, config, executor, progress, meanwhile)


def machine_facts(executor: str = "native") -> MachineFacts:
    """What this machine has, and what this process holds now, with everything that the executor imports.

    Raises CheckpointError if torch is asked for and missing.
    """
    import_executor(executor)
    isa = env.isa()
    float16 = (isa or supported_isas()[0]) == "avx2"
    return MachineFacts(usable_cores(), resident_exactly(), available_memory(), isa, float16)


def choose(
    model: Model,
    asked: EngineConfig,
    machine: MachineFacts,
    weights: Source | None = None,
    *,
    features: Features | None = None,
    plan: RankPlan | None = None,
) -> tuple[ResolvedConfig, Program]:
    """Resolve all options and lower the program, before memory is planned or weights are read.

    `weights`: the weights of the model, if they are already open. `features`: what a draft takes of it. `plan`: the
    part of the model that is wanted, by default all of it.
    """
    model = for_task(model, asked)
    spec, asked = model.facts.spec, _agreed(model, asked)
    traits = ModelTraits(spec.dtype, spec.max_positions, model.facts.longest, whole=spec.whole)
    if machine.nodes == 1:
        machine = replace(machine, nodes=node_count(os.environ, asked.parallel.ranks))
    config = resolve(asked, traits, machine)
    check_pooling_options(spec, config)
    formats = replace(
        _formats(config), kv_scales=_kv_scales(model, config, weights), kv_codes=kv_codes(model, config)
    )
    room = _lora_room(asked.adapters)
    program = lower(spec, formats, plan, features=features, lora=room)
    if asked.formats.quantization == "auto" and asked.loading.load_format != "random":
        stored = _stored_formats(model, program, config, weights)
        if stored:
            program = lower(spec, replace(formats, params=stored), plan, features=features, lora=room)
    if config.head == "f32":
        config = replace(config, notices=(*config.notices, _wide_head(program, config)))
    if config.kv in FP8_KV and not formats.kv_scales:
        config = replace(config, notices=(*config.notices, _NO_SCALES))
    return config, program


def choose_with_draft(
    model: Model, asked: EngineConfig, machine: MachineFacts, weights: Source | None = None
) -> tuple[ResolvedConfig, Program, Draft | None]:
    """`choose`, and the draft that was asked for, lowered for the target's cache. Raises CheckpointError or
    UnsupportedModelError if it does not fit."""
    spec = read_spec(asked.speculation.chosen(), model.facts.spec)
    features = None if spec is None else spec.features
    leading = leading_plan(_rank_plans(model, asked, machine, weights))
    config, program = choose(model, asked, machine, weights, features=features, plan=leading)
    whole = program
    if spec is not None and leading.ranks > 1:
        whole = choose(model, asked, machine, weights, features=features)[1]
    return config, program, _draft(model, whole, config, machine, spec)


def _rank_plans(
    model: Model, asked: EngineConfig, machine: MachineFacts, weights: Source | None
) -> tuple[RankPlan, ...]:
    """Those of all ranks; layers are cut into stages by what they cost."""
    stages = asked.parallel.pipeline_parallel_size
    if stages == 1:
        return rank_plans(asked)
    layers = len(model.facts.spec.layers)
    return rank_plans(asked, stage_layers(choose(model, asked, machine, weights)[1], layers, stages))


def choose_ranks(
    model: Model, asked: EngineConfig, machine: MachineFacts, weights: Source | None = None
) -> tuple[Program, ...]:
    """The programs of all ranks of a model; none if there is one rank."""
    plans = _rank_plans(model, asked, machine, weights)
    if len(plans) == 1:
        return ()
    spec = read_spec(asked.speculation.chosen(), model.facts.spec)
    features = None if spec is None else spec.features
    return tuple(choose(model, asked, machine, weights, features=features, plan=plan)[1] for plan in plans)


def _lora_room(asked: AdapterOptions) -> LoraRoom | None:
    """What adapters may change."""
    if not asked.enable_lora:
        return None
    embedding, head, experts, whole = map(asked.has_room, LORA_TARGETS)
    return LoraRoom(asked.rank, embedding, head, experts, whole)


def _formats(config: ResolvedConfig) -> NumberFormats:
    """The formats that options ask for; weights that are stored in groups may have their own."""
    first, size = config.quantized or config.head, config.asked.formats.quantization_group_size
    return NumberFormats(
        weights=_dtype(config.weights),
        kv=config.kv,
        linears=_quantized(config.quantized, size),
        head=_quantized(config.head, size if config.head == first else None),
    )


_NO_SCALES = (
    "the checkpoint has no scales for an fp8 cache: keys and values are stored as they are (quire calibrate)"
)


def _kv_scales(model: Model, config: ResolvedConfig, weights: Source | None) -> dict[int, HeadScales]:
    """The scales of an fp8 cache: of the file that was asked for, else of the checkpoint. Raises CheckpointError."""
    if config.kv not in FP8_KV or model.gguf is not None or config.asked.loading.load_format == "random":
        return {}
    layers = enumerate(model.facts.spec.layers)
    heads = {index: layer.mixer.kv_heads for index, layer in layers if isinstance(layer.mixer, Attention)}
    if config.asked.formats.kv_cache_scales:
        return read_scales_file(Path(config.asked.formats.kv_cache_scales), heads)
    with nullcontext(weights) if weights is not None else open_weights(model) as opened:
        return read_scales(opened, heads)


def _agreed(model: Model, asked: EngineConfig) -> EngineConfig:
    """The requested options, with "auto" replaced by the checkpoint's format. Raises ValueError for a contradiction."""
    quantization, form = model.facts.quantization, "safetensors" if model.gguf is None else "gguf"
    method = "GGUF" if model.gguf else quantization.method if quantization else "not quantized"
    layout = quantization.layout if quantization else ""
    wanted, load_format = asked.formats.quantization, asked.loading.load_format
    if wanted in STORED and wanted != layout and STORED[wanted] != method:
        raise ValueError(f"quantization: {wanted!r} does not match the checkpoint, which is {method}")
    if load_format in {"safetensors", "gguf"} - {form}:
        raise ValueError(f"load_format: {load_format!r} does not match the model, which is in {form}")
    return asked.replace(
        quantization="auto" if wanted in STORED else wanted,
        load_format="random" if load_format == "random" else "auto",
    )


def _wide_head(program: Program, config: ResolvedConfig) -> str:
    """The cost of an output head in float32, as a message."""
    head = program.param("head")
    size, other = param_bytes(head), param_bytes(replace(head, dtype=_dtype(config.weights)))
    read = step_cost(program, [Row(1, 0)], 1).total.weight_bytes
    tied = " is" if any(param.kind == "table" for param in program.params) else " and the tied embedding are"
    return (
        f"the output head{tied} float32: {format_size(size)} instead of {format_size(other)}, "
        f"{size / read:.0%} of the weights read per decoded token"
    )


def _stored_formats(
    model: Model, program: Program, config: ResolvedConfig, weights: Source | None
) -> dict[str, WeightFormat]:
    """The linears whose tensors are all stored as codes that kernels can compute with: name -> format. For tensors of
    several formats also `name`.0, … -> the format of each. And those that were pruned, see sparse_formats.

    The head stays in floats when requested (`quantize_head` none, `fp32_lm_head`).
    """
    asked, dense = config.asked, model.gguf is None and model.facts.quantization is None
    if dense and not model.facts.pruned:
        return {}
    found: dict[str, WeightFormat] = {}
    with nullcontext(weights) if weights is not None else open_weights(model) as opened:
        if dense:
            return sparse_formats(model, program, config, LoadRules.of(model.facts.spec).view(opened))
        source = LoadRules.of(model.facts.spec, quantized=model.facts.quantization is not None).view(opened)
        if not isinstance(source, CodesSource):
            return {}
        there = set(source.names())
        for param in program.params:
            floats = asked.formats.quantize_head != "auto" or asked.formats.fp32_lm_head
            if param.kind != "linear" or (param.name == "head" and floats):
                continue
            tensors = [part.tensor for part in param.parts]
            formats = [source.packed(name) if name in there else None for name in tensors]
            known = [form for form in formats if form is not None]
            if len(known) < len(formats) or (len(set(known)) > 1 and param.experts):
                continue
            found[param.name] = known[0]
            if len(set(known)) > 1:
                found |= {f"{param.name}.{at}": form for at, form in enumerate(known)}
    return found


def build(
    model: Model,
    asked: EngineConfig,
    progress: Progress | None = None,
    *,
    beside: Mapping[str, int] | None = None,
    startup: Startup | None = None,
    lent: int = 0,
    lost: Callable[[str], None] = lambda _: None,
    replicas: str = "",
) -> Built:
    """Load the weights and bind an engine. `progress(done, total)` is called with bytes of weights.

    `beside` is what the other process of a server holds under the same memory bound, in bytes by part; `lent` the
    most bytes that the engine may borrow for cached blocks from other models. `lost` is called once, from a thread,
    when another rank has ended or hangs. `replicas`: see RankProcesses.

    Raises MemoryBudgetError before anything large is allocated when the bound is too small.
    """
    startup = startup or Startup()
    with startup.span("plan"):
        planned = plan_engine(model, asked, beside)
        programs = planned.programs
        cores = rank_cores(len(programs), planned.config.nodes)
        own = cores[leading_rank(programs)] if programs else ()
        with staying_on(own):  # the executor's threads
            executor = planned.kind.make(planned.program)
    limits = planned.plan.limits
    with started_ranks(planned.model, asked, executor, programs, limits, lost, cores, replicas) as ranks:
        stay_on(own)
        return _build(planned, executor, ranks, progress, startup, lent, replicas)


def _build(
    planned: Planned,
    executor: Executor,
    ranks: RankProcesses | None,
    progress: Progress | None,
    startup: Startup,
    lent: int,
    replicas: str,
) -> Built:
    """Load and bind what was planned."""
    model, config, program, plan = planned.model, planned.config, planned.program, planned.plan
    asked, draft = config.asked, planned.draft
    made = planned.kind.make(draft.program, executor) if draft else None
    later = LaterTokenizer(model, startup, kept_files(asked))
    with startup.span("weights"):
        weights = load_rank(model, program, config, executor, progress, later.read)
        if draft and made:
            try:
                load_weights(draft.origin, draft.program, config, made, None)
            except CheckpointError as error:
                raise CheckpointError(f"draft {draft.origin.name}: {error}") from None
        startup.mark(weights.source)
        if ranks is not None:
            ranks.ready(weights_fingerprint(model, asked, copies=config.nodes > 1), model, plan.limits)
    with startup.span("bind"):
        adapters = _adapters(executor, model, config, plan.limits)
        held = planned.programs or (program,)
        block = sum(kv_block_bytes(each, asked.cache.block_size) for each in held)
        swap = make_swap_space(model, block, config, draft, lent)
        tiers = make_tiers(model, config, held, block, swap, draft)
        worker = make_worker(model, executor, plan.limits, config, adapters, tiers or swap)
        costs = load_costs(model.folder, config)
        scheduler = make_scheduler(program, config, plan, model.facts.spec, costs, tiers or swap, made)
    sharing = shared_experts(executor, planned.programs or (program,), plan.limits, config.threads, replicas)
    grammars = partial(_grammars, later, program, config, plan)
    drafter = draft.drafter(plan.limits, made, program) if draft and made else None
    speculation = make_speculation(config, worker, executor, plan.limits, drafter)
    classes = parse_classes(asked.scheduler.slo)
    controller = StepController(scheduler, classes, costs) if classes else None
    core = EngineCore(
        scheduler, worker, make_gate(scheduler, config), grammars, speculation, adapters, costs, controller
    )
    core.swap, core.tiers, core.work, core.experts = swap, tiers, StepWork(program), worker.experts
    core.paging, core.stages = executor.paging, StageTimes(executor, program)
    if ranks is not None:
        core.rank_seconds = ranks.worked
    if sharing is not None:
        core.replica_waits = lambda: (sharing.waited,)
    if tiers is not None and asked.cache.tiers is not None and asked.cache.tiers.role:
        core.arrivals = Arrivals(tiers, scheduler.caches, scheduler.config)
    if asked.execution.executor == "native":
        core.peaks = load_peaks(executor.isa, config.threads)
    core.record(make_recorder(core.scheduler.config, config.asked, costs, model.folder.name))
    return Built(later.model, config, program, plan, executor, core, weights, made, ranks, sharing)


def plan_engine(model: Model, asked: EngineConfig, beside: Mapping[str, int] | None) -> Planned:
    """What `build` decides before it allocates anything large. Raises MemoryBudgetError if the bound is too small."""
    if asked.parallel.data_parallel_size > 1:
        raise ValueError(
            "data_parallel_size: replicas are of a server of one model, of AsyncLLM and quire batch"
        )
    total = total_memory()
    if asked.limits.memory is not None and asked.limits.memory > total:
        message = (
            f"memory: {format_size(asked.limits.memory)} is more than this machine has ({format_size(total)})"
        )
        raise MemoryBudgetError(message)
    model = for_task(model, asked)
    machine = machine_facts(asked.execution.executor)
    config, program, draft = choose_with_draft(model, asked, machine)
    programs = choose_ranks(model, asked, machine)
    check_paging(config, program, ranks=len(programs) + asked.replica[1] - 1, drafts=draft is not None)
    kind = executor_kind(config, programs)
    held = machine.resident_memory + coming_tokenizer(model)
    read_later = tokenizer_for_grammars(model, asked)
    beside = {**(beside or {}), **other_processes(config)}
    plan = plan_memory(program, config, kind, held, beside, read_later, draft)
    return Planned(model, config, program, programs, draft, kind, plan)


def _adapters(
    executor: Executor, model: Model, config: ResolvedConfig, limits: Limits
) -> AdapterService | None:
    asked = config.asked.adapters
    if not asked.enable_lora:
        return None
    from quire.lora.adapter_service import AdapterService
    from quire.lora.gains import BaseWeights

    weights = None
    if config.asked.loading.load_format != "random":
        origin = weight_origin(model)
        weights = BaseWeights(origin.open, origin.rules)
    return AdapterService(
        executor, model.facts.spec, asked.max_loras, asked.rank, (limits.max_loras, limits.adapter_pages),
        asked.max_cpu_loras or 0, weights,
    )  # fmt: skip


def _draft(
    target: Model, program: Program, config: ResolvedConfig, machine: MachineFacts,
    spec: DraftSpec | MedusaSpec | None,
) -> Draft | None:  # fmt: skip
    """`program` is the whole target's; `spec` is what computes on the target's features, if the method has it."""
    chosen, facts = config.speculation, target.facts
    if chosen is None or (spec is None and chosen.method not in WITH_MODEL):
        return None
    asked = draft_options(config.asked, chosen)
    if spec is not None:
        own = resolve(asked, ModelTraits(facts.spec.dtype, facts.spec.max_positions, facts.longest), machine)
        draft = feature_draft(chosen, spec, _formats(own), program, weight_origin(target))
        return apart(draft, weight_origin(target)) if config.asked.parallel.ranks > 1 else draft
    model = open_model(chosen.model, tokenizer=False)
    if model.gguf is None and model.facts.quantization is None:
        asked = rounded_draft(asked, chosen)
    limited = replace(model.facts, spec=within(model.facts.spec, program.cache_groups))
    model = replace(model, facts=limited)
    check_vocabulary(target, model, asked)
    found = in_one_group(choose(model, asked, machine)[1])
    count = chosen.draft_vocab_size or found.vocab
    program, longest = trimmed(found, count), model.facts.longest
    return Draft(weight_origin(model), program, longest, tree_width=chosen.tree_width)


def _grammars(later: LaterTokenizer, program: Program, config: ResolvedConfig, plan: MemoryPlan) -> Grammars:
    from quire.structured.stepping import GrammarStepper

    def tokenizer() -> Tokenizer | None:
        found, asked = later.model.tokenizer, config.asked
        return found or open_model(later.model.folder, cache=kept_files(asked)).tokenizer

    return GrammarStepper(
        tokenizer,
        plan.grammar_memory,
        program.vocab,
        plan.limits.max_logit_rows,
        threads=config.threads,
        jump=config.asked.execution.jump_forward,
        late_rows=not any(isinstance(group, StateGroup) for group in program.cache_groups),
    )


def _quantized(name: str | None, size: int | None) -> WeightFormat | None:
    """The format that float weights are rounded to; decisions 0008 and 0031."""
    if name == "i4":
        return WeightFormat("i4", Groups(size or INT4_GROUP))
    if name == "i8":
        return WeightFormat("i8", Groups(size or INT8_GROUP, "bf16", rotated=True))
    return WeightFormat(_dtype(name)) if name else None


def _dtype(name: str) -> DType:
    found: dict[str, DType] = {"f32": "f32", "bf16": "bf16", "f16": "f16", "i8": "i8"}
    return found[name]
