"""Convert a tokenizer.json to GGUF metadata; the inverse of text/gguf_tokenizer.

Supports byte-level BPE whose word expression has a GGUF name, or gives the same tokens as one with a name, and
SentencePiece-style BPE with byte fallback. Anything else is refused, because a file with other ids would be worse than
none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from quire.text.pretokenizers import WORDS, Words
from quire.types import UnsupportedModelError

Metadata = dict[str, Any]
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_metadata(
    data: bytes, special_tokens: Mapping[str, str], vocab: int, sample: str
) -> tuple[Metadata, list[str]]:
    """`tokenizer.ggml.*` of a tokenizer.json for a model with `vocab` embedding rows, and notes for the user.

    If its word expression has no name, one is chosen that gives the same tokens for all pieces of the vocabulary, alone
    and joined, and for the text `sample`. Raises UnsupportedModelError naming the part without a GGUF name.
    """
    state = json.loads(data)
    model = state["model"]
    if model.get("type") != "BPE":
        raise _refused(f"a {model.get('type')} vocabulary")
    backend = tokenizers.Tokenizer.from_str(data.decode())
    ids = backend.get_vocab(with_added_tokens=True)
    if max(ids.values(), default=0) >= vocab:
        raise _refused(f"ids beyond the embedding's {vocab} rows")
    tokens = [f"[PAD{number}]" for number in range(vocab)]
    types = [_UNUSED] * vocab
    for token, number in ids.items():
        tokens[number], types[number] = token, _NORMAL
    for added in state.get("added_tokens") or []:
        types[added["id"]] = _CONTROL if added.get("special") else _USER
    notices: list[str] = []
    if model.get("byte_fallback"):
        found = _sentence_piece(state, tokens, types)
    else:
        found = _byte_level(state, backend, sample, notices)
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types, np.int32)}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = special_tokens.get(f"{role}_token", "")
        if token in ids:
            found[f"tokenizer.ggml.{name}_token_id"] = ids[token]
    around = backend.encode("").ids
    for role, key in (("bos_token", "add_bos_token"), ("eos_token", "add_eos_token")):
        found[f"tokenizer.ggml.{key}"] = ids.get(special_tokens.get(role, "")) in around
    return found, notices


def _byte_level(
    state: dict[str, Any], backend: tokenizers.Tokenizer, sample: str, notices: list[str]
) -> Metadata:
    model = state["model"]
    nfc = (state.get("normalizer") or {}).get("type") == "NFC"
    if state.get("normalizer") and not nfc:
        raise _refused(f"the normalizer {json.dumps(state['normalizer'])[:100]}")
    wanted = _shape(state.get("pre_tokenizer"))
    ignores = bool(model.get("ignore_merges"))
    possible = {
        name: words for name, words in WORDS.items() if (words.nfc, words.ignore_merges) == (nfc, ignores)
    }
    fitting = (name for name, words in possible.items() if _shape(_state_of(words.pre_tokenizer())) == wanted)
    found = next(fitting, None)
    if found is None:
        texts = _evidence(backend, sample)
        found = next((name for name, words in possible.items() if _same_tokens(backend, words, texts)), None)
        if found is None:
            raise _refused(f"the pre-tokenizer {json.dumps(state.get('pre_tokenizer'))[:200]}")
        notices.append(
            f"tokenizer.json: its word expression has no name in GGUF. The file gets {found!r}, which gives the same "
            f"tokens for all pieces of the vocabulary and for {len(sample)} characters of sample text, but may give "
            "different tokens for other texts"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": found, "tokenizer.ggml.merges": merges}


def _evidence(backend: tokenizers.Tokenizer, sample: str) -> list[str]:
    """Texts for comparing word expressions: every piece of the vocabulary alone, all of them joined, and a sample."""
    pieces = [backend.decode([number]) for number in sorted(backend.get_vocab().values())]
    return [*pieces, "".join(pieces), " ".join(pieces), sample]


def _same_tokens(backend: tokenizers.Tokenizer, words: Words, texts: list[str]) -> bool:
    """Whether texts have the same tokens with another word expression; control tokens in them are plain text."""
    ids = []
    for pre_tokenizer in (backend.pre_tokenizer, words.pre_tokenizer()):
        plain = tokenizers.Tokenizer(backend.model)
        plain.normalizer, plain.pre_tokenizer = backend.normalizer, pre_tokenizer
        ids.append([encoding.ids for encoding in plain.encode_batch(texts)])
    return ids[0] == ids[1]


def _sentence_piece(state: dict[str, Any], tokens: list[str], types: list[int]) -> Metadata:
    """Scores follow the order of merges: minus the rank of the first merge that makes a piece."""
    steps = [state.get("normalizer"), state.get("pre_tokenizer")]
    text = json.dumps(steps, ensure_ascii=False)
    if "Regex" in text or any(kind in text for kind in ("NFKC", "NFC", "Lowercase", "Strip")):
        raise _refused(f"the pipeline {text[:200]}")
    prefix = '"Prepend"' in text or '"always"' in text or '"first"' in text
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(state["model"]["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    scores = [float(-ranks[token]) if token in ranks else float(-len(ranks) - 1) for token in tokens]
    unknown = state["model"].get("unk_token")
    for number, token in enumerate(tokens):
        if token == unknown:
            types[number] = _UNKNOWN
        elif _BYTE_TOKEN.fullmatch(token):
            types[number] = _BYTE
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip


def _state_of(pre_tokenizer: Any) -> Any:
    holder = tokenizers.Tokenizer(models.BPE())
    holder.pre_tokenizer = pre_tokenizer
    return json.loads(holder.to_str())["pre_tokenizer"]


def _shape(state: Any) -> Any:
    """A pre-tokenizer without parts that change no id: offsets, sequences of one."""
    if state is None:
        return None
    if state.get("type") == "Sequence":
        inner = [_shape(child) for child in state["pretokenizers"]]
        return inner[0] if len(inner) == 1 else inner
    return {key: value for key, value in state.items() if key != "trim_offsets"}


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"tokenizer.json: {what} has no name in GGUF")
