"""The settings of speculative decoding, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.records import dataclass

METHODS = ("ngram",)
MAX_DEPTH = 64  # drafts of a sequence in a step
LONGEST_MATCH = 32  # tokens; NgramIndex::kLongest


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A method of speculation.

    `num_speculative_tokens` is the most drafts of a sequence in a step; how many are run is decided step by step.
    `prompt_lookup_min` and `prompt_lookup_max` are tokens of a match. Raises ValueError naming the field.
    """

    method: str
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = LONGEST_MATCH

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _wrong("method", f"{self.method!r} is not one of {', '.join(METHODS)}")
        for name, least, most in (
            ("num_speculative_tokens", 1, MAX_DEPTH),
            ("prompt_lookup_min", 1, LONGEST_MATCH),
            ("prompt_lookup_max", self.prompt_lookup_min, LONGEST_MATCH),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise _wrong(name, f"{value!r} is not an integer from {least} to {most}")


def parse_speculative_config(given: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Read a JSON object, or its text. Raises ValueError naming the field."""
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ValueError(f"speculative_config: not JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError('speculative_config: not a JSON object such as {"method": "ngram"}')
    known = [f.name for f in fields(SpeculativeConfig)]
    for name in found:
        if name not in known:
            raise _wrong(name, f"is not a field; there are {', '.join(known)}")
    if "method" not in found:
        raise _wrong("method", f"is missing; it is one of {', '.join(METHODS)}")
    return SpeculativeConfig(**found)


def _wrong(field: str, problem: str) -> ValueError:
    return ValueError(f"speculative_config.{field}: {problem}")
