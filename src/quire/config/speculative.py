"""The settings of speculative decoding, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.records import dataclass

METHODS = ("ngram", "draft_model", "self", "lookahead", "eagle", "eagle3", "medusa", "mtp")
WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
WITH_TREES = ("draft_model", "self", "eagle", "eagle3", "medusa", "mtp")  # of what a draft finds likely
WITH_BRANCHES = (
    "draft_model",
    "self",
    "eagle",
    "eagle3",
    "mtp",
)  # whose passes may go on behind several drafts
MAX_TOP_K = 16  # guesses in one place
MAX_TREE_WIDTH = 16  # drafts of one depth that a pass goes on with
FEATURE_METHODS = ("eagle", "eagle3", "medusa", "mtp")  # that compute on what the target leaves
ACCEPTANCES = ("same", "rejection", "typical")
MAX_LAYERS = 1024
MAX_DRAFT_VOCAB = 2**22
MAX_RECENT = 2**22  # tokens of earlier outputs
MAX_DEPTH = 64  # drafts of a sequence in a step
LONGEST_MATCH = 32  # tokens
LONGEST_GRAM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """A method of speculation.

    `num_speculative_tokens` is the most drafts of a sequence in a step; how many are run is decided step by step.
    `prompt_lookup_min` and `prompt_lookup_max` are tokens of a match, `recent_outputs` those of earlier outputs of a
    tenant and namespace that are searched as well. `model` is the checkpoint that drafts, and
    `quantization` what it is rounded to when it is loaded, "" for that of the target. In the method "self", `layers` of
    the model draft, 0 for a quarter of them. `draft_vocab_size`: only so many tokens of the vocabulary, from the first
    on, can be drafts; 0 for all. `top_k` are the guesses that a draft makes in one place, which trees are made of; 1
    for chains. `tree_width`: behind so many drafts of each depth, the likeliest, a draft goes on.
    `lookahead_window` columns, n-grams of `lookahead_ngram` tokens and `lookahead_guesses` are those of lookahead
    decoding. `acceptance` says which drafts are right, and `epsilon` belongs
    to "typical". Raises ValueError naming the field.
    """

    method: str
    num_speculative_tokens: int = 16
    model: str = ""
    quantization: str = ""
    layers: int = 0
    draft_vocab_size: int = 0
    top_k: int = 4
    tree_width: int = 1
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = LONGEST_MATCH
    recent_outputs: int = 0
    lookahead_window: int = 3
    lookahead_ngram: int = 3
    lookahead_guesses: int = 2
    acceptance: str = "same"
    epsilon: float = 0.09

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _wrong("method", f"{self.method!r} is not one of {', '.join(METHODS)}")
        for name, least, most in (
            ("num_speculative_tokens", 1, MAX_DEPTH),
            ("prompt_lookup_min", 1, LONGEST_MATCH),
            ("prompt_lookup_max", self.prompt_lookup_min, LONGEST_MATCH),
            ("recent_outputs", 0, MAX_RECENT),
            ("layers", 0, MAX_LAYERS),
            ("lookahead_window", 1, MAX_DEPTH),
            ("lookahead_ngram", 2, LONGEST_GRAM),
            ("lookahead_guesses", 1, MAX_DEPTH),
            ("draft_vocab_size", 0, MAX_DRAFT_VOCAB),
            ("top_k", 1, MAX_TOP_K),
            ("tree_width", 1, MAX_TREE_WIDTH),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise _wrong(name, f"{value!r} is not an integer from {least} to {most}")
        if self.acceptance not in ACCEPTANCES:
            raise _wrong("acceptance", f"{self.acceptance!r} is not one of {', '.join(ACCEPTANCES)}")
        if (
            isinstance(self.epsilon, bool)
            or not isinstance(self.epsilon, int | float)
            or not 0 < self.epsilon <= 1
        ):
            raise _wrong("epsilon", f"{self.epsilon!r} is not a number above 0 and up to 1")
        for name in ("model", "quantization"):
            if not isinstance(getattr(self, name), str):
                raise _wrong(name, f"{getattr(self, name)!r} is not a text")
        if bool(self.model) != (self.method in WITH_MODEL):
            problem = "no model, which this method needs" if self.method in WITH_MODEL else "takes no model"
            raise _wrong("model", f"{self.method}: {problem}")
        self._check_tree_width()
        if self.method == "lookahead" and self.acceptance != "same":
            raise _wrong("acceptance", f"{self.acceptance!r} is not there for lookahead, only 'same'")
        if self.method == "lookahead" and self.lookahead_drafts > self.num_speculative_tokens:
            raise _wrong(
                "num_speculative_tokens",
                f"{self.num_speculative_tokens} is below the {self.lookahead_drafts} drafts of a tree with "
                f"lookahead_window {self.lookahead_window}, lookahead_ngram {self.lookahead_ngram} and "
                f"lookahead_guesses {self.lookahead_guesses}",
            )

    def _check_tree_width(self) -> None:
        if self.tree_width == 1:
            return
        problem = ""
        if self.method not in WITH_BRANCHES:
            problem = f"there for {', '.join(WITH_BRANCHES)}, not for {self.method}"
        elif self.acceptance != "same":
            problem = f"there for acceptance 'same': under {self.acceptance!r} drafts are chains"
        elif self.top_k == 1:
            problem = "there for top_k above 1: with 1 drafts are chains"
        if problem:
            raise _wrong("tree_width", f"{self.tree_width} is only {problem}")

    @property
    def width(self) -> int:
        """Guesses that a draft makes in one place. Those in trees are judged by "same" only."""
        return self.top_k if self.method in WITH_TREES and self.acceptance == "same" else 1

    @property
    def trees(self) -> bool:
        """Whether drafts may be trees."""
        return self.method == "lookahead" or self.width > 1

    @property
    def lookahead_drafts(self) -> int:
        """The most drafts of a tree: the columns but for the last known token, what they go on by, and guesses."""
        columns = self.lookahead_window - 1 + self.lookahead_window * (self.lookahead_ngram - 2)
        return columns + self.lookahead_guesses * (self.lookahead_ngram - 1)


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
    if "model" in found:
        found = {"method": "draft_model", **found}
    if "method" not in found:
        raise _wrong("method", f"is missing; it is one of {', '.join(METHODS)}")
    return SpeculativeConfig(**found)


def _wrong(field: str, problem: str) -> ValueError:
    return ValueError(f"speculative_config.{field}: {problem}")
