"""Tiny random encoders and classifiers, written and run by transformers: what pooled rows are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from helpers.backends import Backend
from helpers.checkpoints import VOCAB, random_tokens, rope_of
from helpers.stepper import Stepper
from quire.executor.base import F32, Limits
from quire.program.formats import NumberFormats

LENGTHS = (45, 1, 16, 33, 64, 17)  # tokens of the texts that are run
LIMITS = Limits(max_tokens=192, max_rows=6, max_logit_rows=6, max_len=64, num_blocks=20)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class TinyEncoder:
    """A class of transformers by name, its config's, and what differs from the common sizes."""

    name: str
    kind: str
    config: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def labels(self) -> bool:
        return self.kind.endswith("ForSequenceClassification")


_ROBERTA = {"pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}
_MODERN = {"local_attention": 10, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
_QWEN3 = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64} | rope_of("default", 1e6)
ENCODERS = (
    TinyEncoder("bert", "BertModel", "BertConfig"),
    TinyEncoder("bert-labels", "BertForSequenceClassification", "BertConfig", {"num_labels": 3, "hidden_act": "relu"}),
    TinyEncoder("xlm-roberta", "XLMRobertaModel", "XLMRobertaConfig", _ROBERTA),
    TinyEncoder("xlm-roberta-score", "XLMRobertaForSequenceClassification", "XLMRobertaConfig",
                {**_ROBERTA, "num_labels": 1}),
    TinyEncoder("roberta", "RobertaModel", "RobertaConfig", _ROBERTA),
    TinyEncoder("distilbert", "DistilBertModel", "DistilBertConfig",
                {"dim": 48, "n_heads": 4, "n_layers": 2, "hidden_dim": 72}),
    TinyEncoder("distilbert-labels", "DistilBertForSequenceClassification", "DistilBertConfig",
                {"dim": 48, "n_heads": 4, "n_layers": 2, "hidden_dim": 72, "num_labels": 2}),
    TinyEncoder("modernbert", "ModernBertModel", "ModernBertConfig", {**_MODERN, "num_hidden_layers": 4}),
    TinyEncoder("modernbert-labels", "ModernBertForSequenceClassification", "ModernBertConfig",
                {**_MODERN, "num_labels": 5, "classifier_pooling": "mean"}),
    TinyEncoder("nomic", "NomicBertModel", "NomicBertConfig"),
    TinyEncoder("nomic-labels", "NomicBertForSequenceClassification", "NomicBertConfig", {"num_labels": 2}),
    TinyEncoder("gte", "GteModel", "GteConfig", {"type_vocab_size": 1}),
    TinyEncoder("jina-v3", "JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config", _ROBERTA),
    TinyEncoder("jina-v3-score", "JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config",
                {**_ROBERTA, "num_labels": 1}),
    TinyEncoder("qwen3", "Qwen3Model", "Qwen3Config", _QWEN3),
    TinyEncoder("qwen3-score", "Qwen3ForSequenceClassification", "Qwen3Config", {**_QWEN3, "num_labels": 1}),
)  # fmt: skip


def tiny_encoder(name: str) -> TinyEncoder:
    return next(model for model in ENCODERS if model.name == name)


def save_encoder(model: TinyEncoder, folder: Path) -> Any:
    """Write config.json and model.safetensors to `folder`; returns the transformers model, in float32."""
    config = getattr(transformers, model.config)(**(_COMMON | dict(model.overrides)))
    config._attn_implementation = "eager"
    made = getattr(transformers, model.kind)(config)
    generator = torch.Generator().manual_seed(sum(map(ord, model.name)))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in name.lower() or "_ln" in name:
                weight.copy_(1.0 + 0.25 * noise)
            else:
                sharp = 1.5 if any(part in name for part in ("query", "key", "q_", "k_")) else 1.0
                weight.copy_(sharp * noise / weight.shape[-1] ** 0.5)
    made.save_pretrained(folder)
    return made.eval()


def reference_row(model: TinyEncoder, made: Any, tokens: Sequence[int]) -> F32:
    """What transformers makes of one text: its labels' logits, or the mean (of a decoder, the last) hidden state."""
    with torch.inference_mode():
        out = made(input_ids=torch.tensor([list(tokens)]), attention_mask=torch.ones(1, len(tokens)))
    if model.labels:
        found: F32 = out.logits[0].numpy()
        return found
    hidden = out.last_hidden_state[0]
    row: F32 = (hidden[-1] if "Qwen" in model.kind else hidden.mean(0)).numpy()
    return row


def texts(first: int = 3) -> list[list[int]]:
    """Token ids of texts of LENGTHS, none below `first`: transformers takes the padding token out of positions."""
    return [[first + token % (VOCAB - first) for token in random_tokens(n, n)] for n in LENGTHS]


def pooled_rows(
    folder: Path, backend: Backend, batches: Sequence[Sequence[int]], formats: NumberFormats, seed: int = 1
) -> dict[int, F32]:
    """The pooled row of each of `texts`, by number; each batch of numbers is one step."""
    executor = backend.load(folder, formats)
    stepper = Stepper(executor.program, LIMITS, seed=seed)
    executor.bind(LIMITS, stepper.arrays)
    found: dict[int, F32] = {}
    given = texts()
    for batch in batches:
        numbers = {stepper.add(given[number]): number for number in batch}
        size = stepper.fill({mine: len(given[number]) for mine, number in numbers.items()})
        rows = executor.run(size.num_tokens, size.num_rows, size.num_logit_rows)["pooled"].copy()
        ends = [tokens.stop - 1 for tokens in size.tokens_of.values()]
        order = {int(token): row for row, token in enumerate(stepper.arrays.logit_rows[: len(ends)])}
        for mine, tokens in size.tokens_of.items():
            found[numbers[mine]] = rows[order[tokens.stop - 1]]
        for mine in numbers:
            stepper.drop(mine)
    executor.close()
    return found


def worst(found: Mapping[int, F32], wanted: Sequence[F32]) -> float:
    return max(float(np.abs(row - wanted[number]).max()) for number, row in found.items())
