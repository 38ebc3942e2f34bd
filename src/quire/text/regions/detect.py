"""Find out which regions a model's answers have."""

from __future__ import annotations

from quire.records import dataclass
from quire.text.regions.markers import Markers
from quire.text.regions.spec import RegionSpec
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelRegions:
    """The regions of one model, the markers of its vocabulary, and how they were found: "named", "response_template",
    "table", "template" (analysed, with a warning), or "none".
    """

    spec: RegionSpec
    markers: Markers
    source: str


def model_regions(
    tokenizer: Tokenizer,
    template: str | None = None,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ModelRegions:
    """The regions of a checkpoint. Names are vLLM's (`families.CALLS`, `families.REASONING`); without them they are
    found: the checkpoint's `response_template`, the table of families, or an analysis of the chat template, which logs
    what it concluded. Costs some renderings of the template: call it once, in a thread.

    Raises ConfigError naming the option for an unknown name.
    """
    raise NotImplementedError
