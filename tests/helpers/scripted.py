"""A tiny model that says given texts: masks leave one token at each position, so that all else is as with any model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import tokenizers
import torch

from helpers.byte_tokenizer import byte_tokenizer, write_tokenizer
from helpers.checkpoints import TinyModel, save
from quire.engine.core import EngineCore
from quire.engine.planned_step import PlannedStep
from quire.types import SchedulerOutput, StepOutput

VOCAB = 384
CHAT_TEMPLATE = (
    "{% if tools %}[tools] {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}"
    "{% if m.reasoning_content %}[reasoning] {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if thinking %}<think>\n{% endif %}{% endif %}"
)
# Texts of formats that are one token in this vocabulary.
MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]",
    "[/THINK]", "<|python_tag|>", "<|eom_id|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "<|/tool_call|>",
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>",
    "<|END_RESPONSE|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip


def scripted_folder(folder: Path) -> Path:
    """`folder`, now with a tiny model whose vocabulary has every byte, and the markers of many formats."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 4096}
    save(TinyModel("scripted", "LlamaConfig", sizes), folder, torch.float32)
    made = byte_tokenizer(*MARKERS)
    assert made.get_vocab_size() <= VOCAB
    write_tokenizer(folder, made, CHAT_TEMPLATE)
    return folder


class Script:
    """The texts that are said, each to the prompts that contain its key: one for every sample, or one per sample."""

    def __init__(self, folder: Path, end: str = "</s>") -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._eos = self._tokenizer.token_to_id(end)
        self._vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._texts: dict[str, list[list[int]]] = {}
        self._rest: dict[int, list[int]] = {}  # tokens still to be said, by sequence

    def says(self, key: str, *texts: str, end: bool = True) -> None:
        """Without `end` the text goes on with what the model says."""
        self._texts[key] = [self.ids(text) + [self._eos] * end for text in texts]

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @contextlib.contextmanager
    def played(self) -> Iterator[None]:
        """Engines in this process follow the script, without grammars; steps without scripted rows are as ever."""
        ordinary = EngineCore._execute

        def execute(core: Any, step: PlannedStep, beside: PlannedStep | None, begun: int) -> StepOutput:
            out = step.out
            self._begin(out)
            if self._rest.keys().isdisjoint(row.seq_id for row in out.scheduled):
                return ordinary(core, step, beside, begun)
            core._worker.begin(out)
            core._worker.forward(out)
            masks = {row.seq_id: self._masks(row.seq_id, int(row.logits)) for row in out.scheduled}
            result = core._worker.sample({seq: mask for seq, mask in masks.items() if mask is not None})
            for row, tokens in zip(out.scheduled, result.token_ids, strict=True):
                if row.seq_id in self._rest:
                    del self._rest[row.seq_id][: len(tokens)]
            return result

        with mock.patch.object(EngineCore, "_execute", execute):
            yield

    def _begin(self, out: SchedulerOutput) -> None:
        for gone in out.gone:
            self._rest.pop(gone, None)
        for new in out.new:
            prompt = self._tokenizer.decode(new.token_ids[: new.prompt_len], skip_special_tokens=False)
            for key, texts in self._texts.items():
                if key in prompt:
                    said = texts[new.sample_index % len(texts)]
                    self._rest[new.seq_id] = said[len(new.token_ids) - new.prompt_len :]

    def _masks(self, seq: int, logits: int) -> npt.NDArray[np.int32] | None:
        rest = self._rest.get(seq)
        if not rest or not logits:
            return None
        allowed = np.zeros(-(-self._vocab // 32) * 32, np.bool_)
        allowed[rest[0]] = True
        line = np.packbits(allowed, bitorder="little").view(np.int32)
        return np.repeat(line[None], logits, axis=0)
