"""`quire train-draft`: a draft for a target, trained on what the target says about a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quire._native import supported_isas
from quire.config.schema import EngineConfig
from quire.config.speculative import MAX_DRAFT_VOCAB
from quire.engine.build.opening import Model, open_model
from quire.executor.base import I32
from quire.records import dataclass
from quire.spec import MLP, Attention, ModelSpec, Rope
from quire.spec.draft import Features
from quire.train.draft_writer import write_draft
from quire.train.heads import Chain, Eagle, Eagle3, LayerShape, Medusa, SmallModel, TargetWeights
from quire.train.teacher import Teacher, read_tables
from quire.types import CheckpointError
from quire.util.progress import CountProgress

METHODS = ("eagle3", "eagle", "medusa", "draft_model")
HELD_OUT = 20  # every so many texts, one is not trained on
MOST_HELD_OUT = 64
DEEP = 12  # layers from which on EAGLE-3's own choice of layers is used
HEAD_DIM = 64  # of a small model
_WARM_UP = 0.1  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What is trained, and how long. `heads` are Medusa's; `layers` and `hidden_size` those of a small model.
    `intermediate_size`: of MLPs; 0 for that of the target in EAGLE layers, for 2.5 times the width of a small model.
    `draft_vocab_size`: EAGLE-3 has logits of only so many tokens, those that are most frequent in the text; 0 for all.
    `threads`: 0 for all cores. Raises ValueError naming the field.
    """

    method: str = "eagle3"
    steps: int = 1000
    batch_size: int = 8
    length: int = 128
    learning_rate: float = 1e-3
    heads: int = 3
    layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 0
    draft_vocab_size: int = 0
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: {self.method!r} is not one of {', '.join(METHODS)}")
        for name, least, most in (
            ("steps", 1, 10**7),
            ("batch_size", 1, 1024),
            ("length", 16, 8192),
            ("heads", 1, 16),
            ("layers", 1, 64),
            ("hidden_size", HEAD_DIM, 8192),
            ("intermediate_size", 0, 65536),
            ("draft_vocab_size", 0, MAX_DRAFT_VOCAB),
            ("threads", 0, 1024),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}: {value} is not in [{least}, {most}]")
        if self.hidden_size % HEAD_DIM:
            raise ValueError(f"hidden_size: {self.hidden_size} is not a multiple of {HEAD_DIM}")
        if not 0 < self.learning_rate <= 1:
            raise ValueError(f"learning_rate: {self.learning_rate} is not above 0 and at most 1")
        if self.draft_vocab_size and self.method != "eagle3":
            raise ValueError(f"draft_vocab_size: {self.method} has none, only eagle3 does")


@dataclass(frozen=True, slots=True)
class HeldOutAcceptance:
    """Drafts that are what the target says, as a part of those at each depth, on text that was held out."""

    by_depth: tuple[float, ...]

    @property
    def tokens(self) -> float:
        """Tokens a step that chains of all depths would give."""
        return 1 + sum(math.prod(self.by_depth[: depth + 1]) for depth in range(len(self.by_depth)))

    def __str__(self) -> str:
        parts = " ".join(f"{part:.2f}" for part in self.by_depth)
        return f"{parts} by depth, {self.tokens:.2f} tokens a step"


def train_draft(
    name: str, files: Iterable[Path], out: Path, options: TrainingOptions, report: Callable[[str], None]
) -> tuple[HeldOutAcceptance, HeldOutAcceptance]:
    """Train a draft for a model and write its checkpoint to the folder `out`; the acceptance before and after.

    Raises CheckpointError for a model that it cannot be trained for, ValueError for too little text.
    """
    model = open_model(name)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    spec = model.facts.spec
    if options.draft_vocab_size > spec.vocab:
        raise ValueError(f"draft_vocab_size: {options.draft_vocab_size} is above the model's {spec.vocab}")
    train, held_out = _texts(model, files, options)
    features = _features(spec, options.method)
    embed, head = (torch.from_numpy(table) for table in read_tables(model))
    target = TargetWeights(embed, head, spec.embed_scale)
    draft = _draft(spec, options, train, head)
    asked = EngineConfig().replace(threads=options.threads or None)
    teacher = Teacher(model, asked, features, options.batch_size, options.length)
    try:
        before = _acceptance(draft, teacher, target, held_out)
        report(f"before: {before}")
        _train(draft, teacher, target, train, options)
        after = _acceptance(draft, teacher, target, held_out)
        report(f"after: {after}")
    finally:
        teacher.close()
    write_draft(draft, model, features, name, out)
    return before, after


def _features(spec: ModelSpec, method: str) -> Features | None:
    """What a draft takes of the target."""
    if method == "draft_model":
        return None
    return Features(feature_layers(len(spec.layers)) if method == "eagle3" else ())


def feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers before which EAGLE-3 takes features. Raises CheckpointError for a model with fewer than three."""
    if layers < 3:
        raise CheckpointError(f"num_hidden_layers: {layers} are too few for EAGLE-3, which takes three")
    return (2, layers // 2, layers - 3) if layers >= DEEP else (1, layers // 2, layers - 1)


def _texts(model: Model, files: Iterable[Path], options: TrainingOptions) -> tuple[I32, ...]:
    """Pieces of the texts [pieces, length], to train on and held out."""
    if model.tokenizer is None:
        raise CheckpointError("the model has no tokenizer, which a text needs")
    ids: list[int] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"text: {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"text: {file}: not UTF-8") from None
        ids += model.tokenizer.encode(text, add_special_tokens=False)
    pieces = len(ids) // options.length
    if pieces < 2 * options.batch_size:
        need = 2 * options.batch_size * options.length
        raise ValueError(f"text: {len(ids)} tokens are too few; batch_size and length need {need}")
    texts = np.array(ids[: pieces * options.length], np.int32).reshape(pieces, options.length)
    apart = np.arange(0, pieces, max(HELD_OUT, -(-pieces // MOST_HELD_OUT)))
    return np.delete(texts, apart, axis=0), texts[apart]


def _draft(spec: ModelSpec, options: TrainingOptions, texts: I32, head: Tensor) -> Chain:
    if options.method == "medusa":
        return Medusa(spec.dim, options.heads)
    if options.method == "draft_model":
        return SmallModel(_small_shape(spec, options), options.layers, spec.vocab)
    shape = _layer_shape(spec, options.intermediate_size)
    if options.method == "eagle":
        return Eagle(shape)
    if not options.draft_vocab_size:
        return Eagle3(shape)
    often = np.argsort(-np.bincount(texts.reshape(-1), minlength=spec.vocab), kind="stable")
    return Eagle3(shape, torch.from_numpy(np.sort(often[: options.draft_vocab_size])), head)


def _layer_shape(spec: ModelSpec, width: int) -> LayerShape:
    """A layer like those of the target, as far as they are Llama's."""
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    if isinstance(mixer, Attention):
        sizes = mixer.heads, mixer.kv_heads, mixer.head_dim
    else:
        sizes = max(1, spec.dim // 128), max(1, spec.dim // 512), 128
    theta = mixer.rope.theta if isinstance(mixer, Attention) and mixer.rope else 10_000.0
    width = width or (mlp.width if isinstance(mlp, MLP) else 64 * -(-8 * spec.dim // (3 * 64)))
    return LayerShape(spec.dim, *sizes, width, Rope(theta, sizes[2]), spec.norm)


def _small_shape(spec: ModelSpec, options: TrainingOptions) -> LayerShape:
    dim = options.hidden_size
    width = options.intermediate_size or dim * 5 // 2
    return LayerShape(
        dim, dim // HEAD_DIM, dim // HEAD_DIM, HEAD_DIM, width, Rope(10_000.0, HEAD_DIM), spec.norm
    )


def _batch(teacher: Teacher, texts: I32) -> tuple[Tensor, Tensor, Tensor]:
    features, labels = teacher.answer(texts)
    return (
        torch.from_numpy(features.copy()),
        torch.from_numpy(texts.astype(np.int64)),
        torch.from_numpy(labels),
    )


def _train(
    draft: Chain,
    teacher: Teacher,
    target: TargetWeights,
    texts: I32,
    options: TrainingOptions,
) -> None:
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    warm = max(1, round(_WARM_UP * options.steps))
    order = np.random.default_rng(options.seed)
    half = supported_isas()[0] == "avx512"  # which has bfloat16; other processors emulate it
    with CountProgress("training", "steps") as progress:
        for step in range(options.steps):
            rising = min(1.0, (step + 1) / warm)
            falling = 0.5 * (1 + math.cos(math.pi * step / options.steps))
            optimizer.param_groups[0]["lr"] = options.learning_rate * rising * falling
            chosen = texts[order.choice(len(texts), min(options.batch_size, len(texts)), replace=False)]
            batch = _batch(teacher, chosen)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = draft.loss(*batch, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            progress(step + 1, options.steps)


def _acceptance(draft: Chain, teacher: Teacher, target: TargetWeights, texts: I32) -> HeldOutAcceptance:
    rows = teacher.limits.max_rows
    with torch.inference_mode():
        right = [
            draft.right(*_batch(teacher, texts[first : first + rows]), target)
            for first in range(0, len(texts), rows)
        ]
    by_depth = [torch.cat([part.flatten() for part in parts]) for parts in zip(*right, strict=True)]
    return HeldOutAcceptance(tuple(float(each.float().mean()) for each in by_depth))
