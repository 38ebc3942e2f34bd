"""Backends that run the model under evaluation: this folder's torch code, Quire, or transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

# Prompts as token ids, largest number of tokens -> continuations as token ids, without the stop token.
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def torch_backend(folder: Path, stops: set[int]) -> Generate:
    """Float32 in plain torch, batched."""
    import torch

    from . import hf_folder
    from .generation import greedy

    model = hf_folder.load(folder, "cuda" if torch.cuda.is_available() else "cpu")
    return lambda prompts, limit: greedy(model, prompts, stops, limit)


def quire_backend(folder: Path, stops: set[int]) -> Generate:
    """Quire in float32, with all prompts in one call."""
    from quire import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", progress=False)

    def generate(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=limit)
        outputs = llm.generate([list(p) for p in prompts], params)
        return [_until(list(o.outputs[0].token_ids), stops) for o in outputs]

    return generate


def transformers_backend(folder: Path, stops: set[int]) -> Generate:
    """transformers in float32, one prompt at a time: slow, and the reference for the others."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        out = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
            )
            out.append(_until(made[0, len(prompt) :].tolist(), stops))
        return out

    return generate


def _until(ids: list[int], stops: set[int]) -> list[int]:
    return next((ids[:i] for i, token in enumerate(ids) if token in stops), ids)


BACKENDS: dict[str, Callable[[Path, set[int]], Generate]] = {
    "torch": torch_backend,
    "quire": quire_backend,
    "transformers": transformers_backend,
}
