"""Measures how far the number formats of a model are from its checkpoint, prediction by prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config.schema import EngineConfig
from quire.engine.build.opening import Model
from quire.offline.divergence import (
    OWN_TEXT,
    Divergence,
    Predictions,
    TextQuality,
    compare,
    side_by_side,
)
from quire.offline.scorer import OWN_TOKENS, WINDOW, Passage, Progress, Scorer, own_answers, windows
from quire.records import dataclass
from quire.spec.model import LatentAttention


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """One choice of formats: bytes of weights, bytes of cache per token, and the effect on each text."""

    quantization: str
    group_size: int | None
    head: str | None
    kv: str
    weight_bytes: int
    texts: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Formats compared with the `reference`: the checkpoint in its unquantized format, with keys and values in `kv`."""

    reference: str
    kv: str
    weight_bytes: int
    texts: tuple[TextQuality, ...]
    formats: tuple[FormatQuality, ...]


def measure(
    model: Model, asked: EngineConfig, texts: Mapping[str, Sequence[int]], prompts: Sequence[Sequence[int]], *,
    loading: Progress | None = None, comparing: Progress | None = None,
) -> Quality:  # fmt: skip
    """Compare formats on texts (name -> tokens), and on the reference's answers to `prompts`.

    Formats: the quantized weights and the quantized cache of `asked`, each alone and both together; if it has neither,
    int8 and int4 weights and an int8 cache. All are compared with the same reference.

    `loading` is called with bytes of weights, `comparing` with predictions. Raises ValueError for a text of fewer than
    two tokens, MemoryBudgetError when the bound does not hold one copy of the weights.
    """
    longest = min(WINDOW, model.facts.spec.max_positions)
    plain_config = asked.replace(
        quantization="none", quantize_head="none", kv_cache_dtype="auto", kv_cache_scales=None
    )
    plain = Scorer(model, plain_config, longest)
    others = [Scorer(model, config, longest) for config in _alternatives(model, asked, plain_config)]
    predictions = reference_predictions(model, plain, others, texts, prompts, loading)
    formats: list[FormatQuality] = []
    seen: tuple[TextQuality, ...] = ()
    for other in others:
        other.load(loading)
        found = compare(predictions, other, comparing)
        seen = found.texts
        formats.append(_quality(other, found.divergences))
        other.close()
    predictions.close()
    return Quality(plain.config.weights, plain.config.kv, plain.weight_bytes, seen, tuple(formats))


def reference_predictions(
    model: Model, plain: Scorer, others: Sequence[Scorer], texts: Mapping[str, Sequence[int]],
    prompts: Sequence[Sequence[int]], loading: Progress | None, own_tokens: int = OWN_TOKENS,
) -> Predictions:  # fmt: skip
    """The predictions of a model on texts and on its own answers to prompts, in a file unless the memory bound holds
    it beside each of the others. Raises ValueError, MemoryBudgetError.
    """
    for name, tokens in texts.items():
        if len(tokens) < 2:
            raise ValueError(
                f"the text {name} has {len(tokens)} tokens; at least 2 are needed to compare predictions"
            )
    together = side_by_side(plain, others)
    plain.load(loading)
    passages: dict[str, list[Passage]] = {
        name: windows(tokens, plain.longest) for name, tokens in texts.items()
    }
    if prompts:
        seed, stops = plain.config.asked.execution.seed, set(model.facts.generation.eos_token_ids)
        passages[OWN_TEXT] = own_answers(plain, prompts, seed, stops, own_tokens)
    predictions = Predictions(plain, passages)
    if not together:
        predictions.keep()
    return predictions


def _alternatives(model: Model, asked: EngineConfig, plain: EngineConfig) -> list[EngineConfig]:
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in model.facts.spec.layers)
    formats = asked.formats
    weights: dict[str, str | None] = {
        "quantization": formats.quantization, "quantize_head": formats.quantize_head,
    }  # fmt: skip
    kv: dict[str, str | None] = {
        "kv_cache_dtype": formats.kv_cache_dtype,
        "kv_cache_scales": formats.kv_cache_scales,
    }
    quantized = asked.formats.quantization in {"int8", "int4"}
    changes: list[dict[str, str | None]] = []
    if quantized:
        changes.append(weights)
    if asked.formats.kv_cache_dtype != "auto":
        changes.append(kv)
    if len(changes) == 2:
        changes.append(weights | kv)
    if not changes:
        changes = [weights | {"quantization": name} for name in ("int8", "int4")]
        changes += [] if latent else [{"kv_cache_dtype": "int8"}]
    return [plain.replace(**change) for change in changes]


def _quality(scorer: Scorer, texts: tuple[Divergence, ...]) -> FormatQuality:
    quantized, head = (scorer.config.quantized, scorer.config.head)
    linears = [param for param in scorer.program.params if param.groups]
    sizes = [
        param.groups.size for param in linears if param.groups and (param.name != "head" or not quantized)
    ]
    return FormatQuality(
        quantization=scorer.config.asked.formats.quantization if quantized else "none",
        group_size=max(sizes) if sizes else None,
        head=head,
        kv=scorer.config.kv,
        weight_bytes=scorer.weight_bytes,
        texts=texts,
    )
