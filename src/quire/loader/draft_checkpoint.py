"""What the checkpoints of drafts have beside weights: a file of another name, and the numbers of their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.loader.checkpoint import SINGLE
from quire.loader.load import LoadRules
from quire.loader.source import Source
from quire.spec.draft import DraftSpec, MedusaSpec
from quire.types import CheckpointError

MEDUSA = "medusa_lm_head.safetensors"


def draft_file(folder: Path) -> str:
    """The name of the file with the weights, when they are in one."""
    return MEDUSA if (folder / MEDUSA).exists() else SINGLE


def draft_rules(draft: DraftSpec | MedusaSpec, *, quantized: bool = False) -> LoadRules:
    """The tensors that the checkpoint of a draft may have beside those of its program."""
    if isinstance(draft, MedusaSpec):
        return LoadRules(ignored=draft.ignored, prefixes=draft.prefixes)
    rules = LoadRules.of(draft.model, quantized=quantized)
    for more in (LoadRules.of(module.model) for module in draft.further):
        rules = replace(rules, twins={**rules.twins, **more.twins}, stacks=rules.stacks + more.stacks)
    return rules


def draft_ids(source: Source, draft: DraftSpec) -> npt.NDArray[np.int32] | None:
    """The target's id of each token that the draft has logits for, from `d2t`, the difference of the two.

    None where the numbers are the same. Raises CheckpointError for a tensor that is missing, of another shape or
    format, or with an id outside the vocabulary.
    """
    if not draft.mapped:
        return None
    if "d2t" not in set(source.names()):
        raise CheckpointError("the checkpoint lacks tensor d2t, the tokens of the draft vocabulary")
    info = source.info("d2t")
    if info.shape != (draft.vocab,) or info.dtype not in {"I64", "I32"}:
        raise CheckpointError(f"tensor d2t: {info.dtype} {list(info.shape)} is not I64 [{draft.vocab}]")
    ids = np.arange(draft.vocab) + source.read("d2t").astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= draft.model.vocab))
    if wrong.size:
        at = int(wrong[0])
        raise CheckpointError(
            f"tensor d2t: element {at} names token {ids[at]}, outside the vocabulary of {draft.model.vocab} tokens"
        )
    return ids.astype(np.int32)
