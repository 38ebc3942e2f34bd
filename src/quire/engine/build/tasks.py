"""What a checkpoint is opened for: text, or vectors and scores of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.opening import Model
from quire.spec.facts import ModelFacts
from quire.spec.headless import pooled
from quire.spec.model import Dense, ModelSpec, Pooling, PoolKind
from quire.spec.pooling_facts import PoolingFacts, SentenceFolder, read_sentence_folder
from quire.types import CheckpointError
from quire.util.strict_json import read_json_object

_KINDS: dict[str, PoolKind] = {"mean": "mean", "cls": "first", "last": "last"}
_MAX_VOCABULARY = 256 * 2**20
SCORE_TOKENS = ("no", "yes")  # a decoder that scores says one of them (Qwen3-Reranker, arXiv 2506.05176)


def for_task(model: Model, asked: EngineConfig) -> Model:
    """The model with the facts of the task that is asked for, and the same model if it has them already.

    Raises ValueError for a task that the checkpoint cannot do.
    """
    facts = _for_task(model.facts, model.folder, asked.execution.task, asked.execution.pooling)
    return model if facts == model.facts else replace(model, facts=facts)


def _for_task(facts: ModelFacts, folder: Path, task: str, kind: str) -> ModelFacts:
    sentences = read_sentence_folder(folder) if folder.is_dir() else None
    if task == "auto":
        known = facts.pooling
        task = known.task if known is not None else "embed" if sentences is not None else "generate"
    if kind != "auto" and task != "embed":
        raise ValueError(f"pooling: {kind!r} is for the task embed, not {task}")
    if task == "generate" and facts.spec.pooling is not None:
        raise ValueError(
            f"task: 'generate' needs the head of a language model, which {facts.architecture} lacks"
        )
    match task:
        case "generate":
            return facts
        case "embed":
            return _embedding(facts, sentences, kind)
        case "classify":
            return _classifying(facts)
        case _:
            return _scoring(facts, folder)


def _embedding(facts: ModelFacts, sentences: SentenceFolder | None, kind: str) -> ModelFacts:
    spec, known = facts.spec, facts.pooling
    if known is not None and known.labels:
        raise ValueError(f"task: 'embed' is not for {facts.architecture}, whose output is labels")
    chosen = _KINDS[kind] if kind != "auto" else (sentences.kind if sentences else None)
    chosen = chosen or (spec.pooling.kind if spec.pooling else "last")
    pooling = Pooling(chosen, sentences.layers if sentences is not None else ())
    _check_widths(pooling, spec.dim)
    if spec.pooling != pooling:
        spec = pooled(spec, pooling)
    about = PoolingFacts(task="embed", dimensions=pooling.outputs or spec.dim)
    if sentences is not None:
        about = replace(
            about,
            normalise=bool(sentences.normalise),
            prompts=dict(sentences.prompts),
            default_prompt=sentences.default_prompt,
        )
        if sentences.max_length:
            spec = replace(spec, max_positions=min(spec.max_positions, sentences.max_length))
    return replace(facts, spec=spec, pooling=about)


def _check_widths(pooling: Pooling, width: int) -> None:
    """Raise CheckpointError unless each layer takes what the one before it gives."""
    for layer in pooling.dense:
        if isinstance(layer, Dense):
            if layer.inputs != width:
                where = layer.name.rpartition("/")[0]
                raise CheckpointError(
                    f"{where}/config.json: in_features: {layer.inputs} is not {width}, what it gets"
                )
            width = layer.outputs


def _classifying(facts: ModelFacts) -> ModelFacts:
    known = facts.pooling
    if known is None or not known.labels:
        raise ValueError(f"task: 'classify' needs a model with labels, and {facts.architecture} has none")
    return replace(facts, pooling=replace(known, task="classify"))


def _scoring(facts: ModelFacts, folder: Path) -> ModelFacts:
    """Of a model with one label, that; of a decoder, how much likelier one of two tokens is than the other."""
    spec, known = facts.spec, facts.pooling
    if known is not None and known.labels:
        if len(known.labels) != 1:
            raise ValueError(
                f"task: 'score' needs a model with one label, and this one has {len(known.labels)}"
            )
        return replace(facts, pooling=replace(known, task="score"))
    if known is not None and known.judge:
        return facts
    if known is not None:
        raise ValueError(
            f"task: 'score' needs a model with a label or a head, and {facts.architecture} has neither"
        )
    name = spec.names.embed if spec.tied else spec.names.head
    tokens = tuple(_token_id(folder, token) for token in SCORE_TOKENS)
    head = Dense(name, spec.dim, len(tokens), bias=False, tokens=tokens, rows=spec.vocab)
    return replace(
        facts,
        spec=pooled(spec, Pooling("last", (head,))),
        pooling=PoolingFacts(task="score", squash="softmax", judge=True),
    )


def _token_id(folder: Path, token: str) -> int:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: task 'score' needs tokenizer.json, to find the token {token!r}")
    model = read_json_object(path, _MAX_VOCABULARY).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    if not isinstance(found, int):
        raise CheckpointError(f"tokenizer.json: task 'score' needs the token {token!r}, which it lacks")
    return found


def check_pooling_options(spec: ModelSpec, config: ResolvedConfig) -> None:
    """Raise ValueError for options that a model with pooling cannot have."""
    if spec.pooling is None:
        return
    if config.speculation is not None:
        raise ValueError("speculate: a model with pooling generates no tokens")
    if config.asked.adapters.enable_lora:
        raise ValueError("enable_lora: adapters are for models that generate text")
    asked = config.asked.scheduler
    if asked.batching != "continuous":
        raise ValueError(f"batching: {asked.batching!r} is for models that generate text")
