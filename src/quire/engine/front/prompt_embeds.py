"""Prompts as rows of embeddings: what a request sends in place of a prompt's tokens, checked.

A payload is a file of safetensors with one tensor [tokens, hidden] of F32, BF16 or F16: a length, a JSON header and
numbers, and nothing that could become code. The rows take the place of what the table has for ids, so no multiplier
of embeddings applies to them. Positions have the placeholder 0, and cached blocks are known by a digest of the rows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.types import ContextLengthError, Request, RequestError, SoftSpan, TokenIds

if TYPE_CHECKING:
    from quire.executor.base import F32

FIELD = "prompt_embeds"
MAX_HEADER_BYTES = 4096
_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


class PromptEmbeds(list[int]):
    """The placeholders of a prompt whose embeddings are `rows`: float32 [tokens, hidden] as bytes."""

    __slots__ = ("rows",)

    def __init__(self, rows: F32, dim: int) -> None:
        """`dim` is the hidden size of the model, 0 if it takes no rows. Raises RequestError."""
        import numpy as np  # the API process starts without it

        _check_enabled(dim)
        if rows.ndim != 2 or rows.shape[1] != dim or not len(rows):
            raise RequestError(FIELD, f"{list(rows.shape)} is not [tokens, {dim}], the model's hidden size")
        if not np.isfinite(rows).all():
            raise RequestError(FIELD, "holds NaN or infinity")
        super().__init__([0] * len(rows))
        self.rows = np.ascontiguousarray(rows, np.float32).tobytes()


def from_array(given: Any, dim: int) -> PromptEmbeds:
    """A prompt from an array or a tensor of floats [tokens, hidden]. Raises RequestError."""
    import numpy as np

    tensor = given.detach().float().cpu().numpy() if hasattr(given, "detach") else given
    try:
        rows = np.asarray(tensor)
    except (TypeError, ValueError) as error:
        raise RequestError(FIELD, f"is not an array: {error}") from None
    if rows.dtype.kind != "f":
        raise RequestError(FIELD, f"{rows.dtype} is not a float type")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinity
        return PromptEmbeds(rows.astype(np.float32), dim)


def from_base64(text: str, dim: int, longest: int) -> PromptEmbeds:
    """A prompt from a payload of up to `longest` tokens. Its size is checked before anything is decoded.

    Raises RequestError, ContextLengthError over the limit.
    """
    _check_enabled(dim)
    most = 8 + MAX_HEADER_BYTES + 4 * longest * dim
    if len(text) > (most + 2) // 3 * 4:
        raise ContextLengthError(
            FIELD, f"{len(text)} characters are over what {longest} tokens of {dim} float32 take"
        )
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(FIELD, f"is not base64: {error}") from None
    return PromptEmbeds(_tensor(data, dim, longest), dim)


def embedded(request: Request, prompt: PromptEmbeds) -> Request:
    """The request with the rows of its prompt. Raises RequestError for what rows do not have."""
    params = request.params
    for name, asked in (
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("repetition_penalty", params.repetition_penalty != 1),
        ("dry_multiplier", params.dry_multiplier > 0),
    ):
        if asked:
            raise RequestError(name, f"not supported with {FIELD}: it needs the tokens of the prompt")
    if params.guidance_scale != 1 and request.negative_prompt == TokenIds([0]):
        raise RequestError("negative_prompt", f"is needed for a guidance_scale with {FIELD}")
    if request.beams is not None:
        raise RequestError("use_beam_search", f"not supported with {FIELD}")
    span = SoftSpan(0, len(prompt), hashlib.sha256(prompt.rows).digest())
    return replace(request, soft_tokens=(span,), prompt_embeds=prompt.rows)


def _check_enabled(dim: int) -> None:
    if not dim:
        raise RequestError(FIELD, "not accepted: start with --enable-prompt-embeds (enable_prompt_embeds)")


def _tensor(data: bytes, dim: int, longest: int) -> F32:
    """The rows of the only tensor of a file of safetensors."""
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise RequestError(FIELD, f"is not safetensors with a header of up to {MAX_HEADER_BYTES} bytes")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        raise RequestError(FIELD, "the header is not JSON") from None
    tensors = (
        [value for name, value in header.items() if name != "__metadata__"]
        if isinstance(header, dict)
        else []
    )
    if len(tensors) != 1 or not isinstance(tensors[0], Mapping):
        raise RequestError(FIELD, f"has {len(tensors)} tensors, one is expected")
    dtype, shape, ends = (tensors[0].get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise RequestError(FIELD, f"{str(dtype)[:20]} is not one of {', '.join(_BYTES)}")
    if not isinstance(shape, list) or len(shape) != 2 or {type(side) for side in shape} != {int}:
        raise RequestError(FIELD, f"the shape is not [tokens, {dim}]")
    tokens, cols = shape
    if cols != dim or tokens < 1:
        raise RequestError(FIELD, f"{shape} is not [tokens, {dim}], the model's hidden size")
    if tokens > longest:
        raise ContextLengthError(FIELD, f"{tokens} tokens do not fit in the context of {longest + 1} tokens")
    import numpy as np

    body = data[8 + size :]
    if ends != [0, len(body)] or len(body) != tokens * dim * _BYTES[dtype]:
        raise RequestError(FIELD, f"holds {len(body)} bytes, not those of {shape} in {dtype}")
    if dtype == "BF16":
        rows = (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        rows = np.frombuffer(body, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    return rows.reshape(tokens, dim)
