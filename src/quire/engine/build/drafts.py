"""The draft of speculative decoding: what it must have in common with the target, and where its cache lies.

The cache of a draft has as many blocks as the target's and the same block table, of the group that keeps tokens
longest. So what the scheduler gives to a sequence, finds by a prefix or takes back counts for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.cache_kinds import KV_DTYPES, LATE_KV, NUQ_KV, CacheGroup, FullGroup, StateGroup
from quire.config.schema import STORED, EngineConfig
from quire.config.speculative import FEATURE_METHODS, SpeculativeConfig
from quire.engine.build.load_weights import Origin
from quire.engine.build.opening import Model, find_model, kept_files, open_model
from quire.executor.base import Executor, Limits
from quire.loader import Checkpoint, Source, checkpoint_files
from quire.loader.draft_checkpoint import draft_file, draft_ids, draft_rules
from quire.loader.target_tensors import TargetTensors
from quire.program.formats import DTYPE_BYTES, NumberFormats
from quire.program.lower_draft import lower_draft, lower_medusa, module_count, trimmed
from quire.program.program import Program
from quire.records import dataclass
from quire.spec import Attention, ModelSpec
from quire.spec.draft import DraftSpec, Features, MedusaSpec
from quire.spec.draft_config import mtp_draft, read_draft
from quire.speculate.build import Drafter
from quire.speculate.feature_drafts import KEPT
from quire.types import CheckpointError

DRAFT_TOKENS = 256  # of a pass: a prompt is computed in several


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft, lowered: a model of its own, or what computes on the target's features.

    `longest`: the longest text that it is for, 0 for as long as the target's. `ids`: see draft_ids. `tree_width`: rows
    of a sequence in one pass.
    """

    origin: Origin
    program: Program
    longest: int = 0
    features: Features | None = None
    ids: npt.NDArray[np.int32] | None = None
    tree_width: int = 1

    @property
    def heads(self) -> int:
        """Of Medusa, which make their drafts in one pass; 0 for what makes one in each."""
        return 0 if self.program.kv_layers else self.program.buffer("logits").cols // self.program.vocab

    def limits(self, target: Limits) -> Limits:
        """What its executor is built for."""
        if not self.program.kv_layers:
            tokens = rows = target.max_rows
        else:
            rows = max(target.max_rows, self._drawn(target))
            paths = rows * module_count(self.program)  # modules compute whole paths
            tokens = max(paths, min(DRAFT_TOKENS, target.max_tokens))
        branches = target.branches if self.tree_width > 1 else 0
        return replace(
            target, max_tokens=tokens, max_logit_rows=rows, branches=branches, branch_blocks=branches
        )

    def _drawn(self, target: Limits) -> int:
        """The most places that a pass gives: each has a draft at least."""
        return min(target.max_rows * (self.heads or self.tree_width), target.max_logit_rows - target.max_rows)

    def kept_bytes(self, target: Limits, vocab: int) -> int:
        """What features take that wait for a pass, beside those of a step that are put together; and logits with a
        column for each token of the target's `vocab`, where the draft has others."""
        other = self.ids is not None or self.program.vocab != vocab
        wide = self._drawn(target) * vocab if other else 0
        kept = 0
        if self.features is not None:
            kept = target.max_rows * KEPT + target.max_logit_rows + target.max_tokens
            kept *= self.program.buffer("features").cols * module_count(self.program)
        return (wide + kept) * DTYPE_BYTES["f32"]

    def drafter(self, target: Limits, executor: Executor, program: Program) -> Drafter:
        """What drafts, with an executor that holds the weights, for a target with these limits and this program."""
        group, longest = longest_group(program.cache_groups), self.longest or target.max_len
        window = program.cache_groups[group].window
        return Drafter(executor, self.limits(target), group, window, longest, self.features, self.ids)


def read_spec(chosen: SpeculativeConfig | None, target: ModelSpec) -> DraftSpec | MedusaSpec | None:
    """What the method says computes on the target's features; None for other methods. Raises CheckpointError or
    UnsupportedModelError if it does not fit the target."""
    if chosen is None or chosen.method not in FEATURE_METHODS:
        return None
    if chosen.method == "mtp":
        return mtp_draft(target)
    try:
        return read_draft(find_model(chosen.model), chosen.method, target)
    except CheckpointError as error:
        raise CheckpointError(f"draft {chosen.model}: {error}") from None


def feature_draft(
    chosen: SpeculativeConfig,
    spec: DraftSpec | MedusaSpec,
    formats: NumberFormats,
    target: Program,
    origin: Origin,
) -> Draft:
    """The draft for a target with this program, whose weights come from `origin`. Raises CheckpointError."""
    if chosen.method != "mtp":
        folder = find_model(chosen.model)
        single = draft_file(folder)
        origin = Origin(
            folder,
            draft_rules(spec),
            lambda: checkpoint_files(folder, single),
            lambda: Checkpoint(folder, single),
        )
    else:
        origin = replace(origin, rules=draft_rules(spec))
    count = chosen.draft_vocab_size or spec.vocab
    if isinstance(spec, MedusaSpec):
        program = lower_medusa(spec, formats, target, min(count, spec.vocab))
        return Draft(origin, program, features=spec.features)
    further = tuple(replace(each, model=within(each.model, target.cache_groups)) for each in spec.further)
    spec = replace(spec, model=within(spec.model, target.cache_groups), further=further)
    program = in_one_group(trimmed(lower_draft(spec, formats, target), count))
    ids = None
    if spec.mapped:
        with origin.open() as source:
            ids = draft_ids(source, spec)
    return Draft(
        origin, program, 0, spec.features, None if ids is None else ids[:count], tree_width=chosen.tree_width
    )


_OF_TARGET = "target:"  # begins the names of tensors that are not in the draft's checkpoint


def apart(draft: Draft, target: Origin) -> Draft:
    """A draft that holds itself what it would borrow of the target's executor, which is of one rank and has a part."""
    parts = [part for param in draft.program.borrowed for part in param.parts]
    own = draft.origin

    @contextmanager
    def opened() -> Iterator[Source]:
        with own.open() as first, target.open() as second:
            source, other = own.rules.view(first), target.rules.view(second)
            there = set(other.names())
            taken = {
                _OF_TARGET + part.tensor: part.tensor
                if part.tensor in there
                else target.rules.twins.get(part.tensor, part.tensor)
                for part in parts
            }
            yield TargetTensors(source, other, taken)

    held = tuple(
        replace(param, parts=tuple(replace(part, tensor=_OF_TARGET + part.tensor) for part in param.parts))
        for param in draft.program.borrowed
    )
    origin = Origin(
        own.name,
        replace(own.rules, prefixes=(), stacks=()),
        lambda: [*own.files(), *target.files()],
        opened,
    )
    program = replace(draft.program, params=draft.program.params + held, borrowed=())
    return replace(draft, origin=origin, program=program)


def draft_options(asked: EngineConfig, chosen: SpeculativeConfig) -> EngineConfig:
    """The options of the draft model: those of the target, but for what the method says."""
    formats = asked.formats
    quantization = chosen.quantization or ("auto" if formats.quantization in STORED else formats.quantization)
    same = quantization == formats.quantization
    return asked.replace(
        quantization=quantization,
        quantization_group_size=formats.quantization_group_size if same else None,
        load_format="random" if asked.loading.load_format == "random" else "auto",
        # a draft keeps its few layers in one group of blocks
        kv_cache_dtype="auto"
        if KV_DTYPES.get(formats.kv_cache_dtype) in (*LATE_KV, *NUQ_KV)
        else formats.kv_cache_dtype,
        kv_cache_scales=None,
        max_model_len=None,
        enable_lora=False,
    )


def rounded_draft(asked: EngineConfig, chosen: SpeculativeConfig) -> EngineConfig:
    """The options of a draft model that is stored in floats: int8 unless another format is asked for. It is read as
    often as there are drafts, and what it loses by rounding costs drafts, not answers."""
    floats = not chosen.quantization and asked.formats.quantization in {"auto", "none"}
    return asked.replace(quantization="int8") if floats else asked


def longest_group(groups: tuple[CacheGroup, ...]) -> int:
    """The number of the group that keeps tokens longest."""
    kept = [-1 if isinstance(g, StateGroup) else g.window or 2**31 for g in groups]
    return kept.index(max(kept))


def within(spec: ModelSpec, groups: tuple[CacheGroup, ...]) -> ModelSpec:
    """A draft that attends to no more tokens than the target's groups keep."""
    window = groups[longest_group(groups)].window
    if not window:
        return spec
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, window=min(layer.mixer.window or window, window)))
        if isinstance(layer.mixer, Attention)
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def in_one_group(program: Program) -> Program:
    """A program whose layers all keep their tokens in one group."""
    layers = tuple(replace(kv, group=0, index_in_group=at) for at, kv in enumerate(program.kv_layers))
    group = FullGroup(tuple(kv.layer for kv in layers))
    return replace(program, kv_layers=layers, cache_groups=(group,), layers_per_group=len(layers))


def check_vocabulary(target: Model, draft: Model, asked: EngineConfig) -> None:
    """Raise CheckpointError, with the first difference, unless both give the same ids to the same tokens."""
    files = [model.folder / "tokenizer.json" for model in (target, draft)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return
    if not target.folder.exists():
        return  # random weights of a shape
    found = [open_model(model.folder, cache=kept_files(asked)).tokenizer for model in (target, draft)]
    if None in found:
        return  # one of them accepts token ids only
    ids = range(min(target.facts.spec.vocab, draft.facts.spec.vocab))
    wanted, theirs = ([] if tokenizer is None else tokenizer.pieces(ids) for tokenizer in found)
    for token, (one, other) in enumerate(zip(wanted, theirs, strict=True)):
        if one != other:
            raise CheckpointError(
                f"draft model {draft.folder}: its vocabulary is not that of the model: token {token} is {other!r}, "
                f"not {one!r}"
            )
