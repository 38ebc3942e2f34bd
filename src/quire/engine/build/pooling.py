"""What a checkpoint is opened for: text, or vectors and scores of texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config.schema import EngineConfig, ResolvedConfig
from quire.engine.build.opening import Model
from quire.spec.facts import ModelFacts
from quire.spec.headless import pooled
from quire.spec.model import Dense, ModelSpec, Pooling, PoolKind
from quire.spec.pooling import PoolingFacts, read_sentence_folder
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
    spec, known = facts.spec, facts.pooling
    sentences = read_sentence_folder(folder) if folder.is_dir() else None
    if task == "auto":
        task = known.task if known is not None else "embed" if sentences is not None else "generate"
    if task == "generate":
        if spec.pooling is not None:
            raise ValueError(
                f"task: 'generate' needs the head of a language model, which {facts.architecture} lacks"
            )
        if kind != "auto":
            raise ValueError(f"pooling: {kind!r} is for --task embed, and this model generates text")
        return facts
    labels = known is not None and bool(known.labels)
    if task == "embed":
        if labels:
            raise ValueError(f"task: 'embed' is not for {facts.architecture}, whose output are labels")
        chosen = _KINDS[kind] if kind != "auto" else (sentences.kind if sentences else None)
        chosen = chosen or (spec.pooling.kind if spec.pooling else "last")
        made = pooled(spec, Pooling(chosen)) if spec.pooling != Pooling(chosen) else spec
        about = PoolingFacts(task="embed", dimensions=spec.dim)
        if sentences is not None:
            about = replace(
                about, normalise=bool(sentences.normalise), prompts=dict(sentences.prompts),
                default_prompt=sentences.default_prompt, max_length=sentences.max_length,
            )  # fmt: skip
            if sentences.max_length:
                made = replace(made, max_positions=min(made.max_positions, sentences.max_length))
        return replace(facts, spec=made, pooling=about)
    if kind != "auto":
        raise ValueError(f"pooling: {kind!r} is for --task embed, not {task}")
    if labels:
        assert known is not None
        if task == "score" and len(known.labels) != 1:
            raise ValueError(
                f"task: 'score' needs a model with one label, and this one has {len(known.labels)}"
            )
        return replace(facts, pooling=replace(known, task=task))
    if task == "classify" or spec.encoder:
        raise ValueError(f"task: {task!r} needs a model with labels, and {facts.architecture} has none")
    if known is not None and known.task == "score":
        return facts
    return replace(
        facts, spec=_scoring(spec, folder), pooling=PoolingFacts(task="score", squash="softmax", judge=True)
    )


def _scoring(spec: ModelSpec, folder: Path) -> ModelSpec:
    """A decoder whose logits of two tokens are the score."""
    name = spec.names.embed if spec.tied else spec.names.head
    tokens = tuple(_token_id(folder, token) for token in SCORE_TOKENS)
    head = Dense(name, spec.dim, len(tokens), bias=False, tokens=tokens, rows=spec.vocab)
    return pooled(spec, Pooling("last", (head,)))


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
    asked = config.asked.scheduler
    if asked.batching != "continuous":
        raise ValueError(f"batching: {asked.batching!r} is for models that generate text")
