"""generation_config.json: which tokens end a text, and how the model's authors sample from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.types import PARAMETERS, CheckpointError, RequestError, SamplingParams, parameter_names

_MAX_EOS = 1024
_MAX_INT = 2**31 - 1
# Keys that would change the output and that Quire does not take from a checkpoint, with the values for "off".
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "suppress_tokens": (None,),
}


@dataclass(frozen=True, slots=True)
class Generation:
    """Special token ids and sampling defaults of a checkpoint.

    `sampling` maps SamplingParams field names to the values the checkpoint recommends; only those it names.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    sampling: Mapping[str, Any]  # numbers; Any, so that SamplingParams(**sampling) type-checks


def read_generation(config: ConfigReader, generation: ConfigReader | None, vocab: int) -> Generation:
    """Merge config.json with generation_config.json, whose token ids win as they do in transformers.

    Ids outside the vocabulary are left out with a notice. Raises CheckpointError for a sampling value out of range.
    """
    readers = [config] if generation is None else [generation, config]
    return Generation(
        eos_token_ids=next((ids for r in readers if (ids := _eos(r, vocab))), ()),
        bos_token_id=next(
            (i for r in readers if (i := _token_id(r, "bos_token_id", vocab)) is not None), None
        ),
        pad_token_id=next(
            (i for r in readers if (i := _token_id(r, "pad_token_id", vocab)) is not None), None
        ),
        sampling={} if generation is None else _sampling(generation),
    )


def _eos(reader: ConfigReader, vocab: int) -> tuple[int, ...]:
    value = reader.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_EOS:
        raise reader.error("eos_token_id", f"{len(ids)} ids are more than the limit of {_MAX_EOS}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise reader.error("eos_token_id", f"{show(value)} is neither an integer nor a list of integers")
    found = dict.fromkeys(ids)
    outside = [token for token in found if not 0 <= token < vocab]
    if outside:
        reader.notices.append(
            f"{reader.where}: eos_token_id: {show(outside)} is outside the vocabulary of {vocab} tokens: ignored"
        )
    return tuple(token for token in found if token not in outside)


def _token_id(reader: ConfigReader, key: str, vocab: int) -> int | None:
    """bos and pad ids are hints that nothing is computed from: one out of range is only reported."""
    token = reader.integer(key, None, low=-_MAX_INT, high=_MAX_INT)
    if token is not None and not 0 <= token < vocab:
        reader.notices.append(f"{reader.where}: {key} = {token} is outside the vocabulary: ignored")
        return None
    return token


def _sampling(generation: ConfigReader) -> dict[str, Any]:
    out: dict[str, Any] = {}
    # What files in GGUF recommend has its name here if transformers has none. SamplingParams knows the ranges.
    keys = {name: name for name in parameter_names("GGUF").values()} | parameter_names("generation_config")
    for key, name in keys.items():
        read = generation.number if PARAMETERS[name].kind is float else generation.integer
        if (number := read(key, None, low=-_MAX_INT, high=_MAX_INT)) is not None:
            out[name] = number
    if generation.has("do_sample") and not generation.boolean("do_sample", True):
        out["temperature"] = 0.0
    try:
        SamplingParams(**out)
    except RequestError as error:
        raise CheckpointError(f"{generation.where}: {error}") from None
    for key, off in _NOT_APPLIED.items():
        if generation.values.get(key) not in off:
            value = show(generation.values[key])
            generation.notices.append(f"{generation.where}: {key} = {value} is not applied")
    return out
