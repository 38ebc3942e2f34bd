"""Find out which regions a model's answers have."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from quire.answers import PartKind
from quire.records import dataclass
from quire.text.chat_renderer import ChatAsk, ChatTemplates
from quire.text.regions.families import (
    CALLS,
    CALLS_SIGNS,
    REASONING,
    REASONING_SIGNS,
    VARIANTS,
    check_parsers,
)
from quire.text.regions.markers import Markers
from quire.text.regions.probe import ARGUMENTS, NAMES, PARAMETERS, Answers, probed_calls, probed_reasoning
from quire.text.regions.reader import read_whole
from quire.text.regions.response_template import spec_of_response_template
from quire.text.regions.spec import CallSpec, ChannelCall, ReasoningSpec, RegionSpec
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, QuireError

logger = logging.getLogger("quire.text")
_SHOWN = 60  # characters of a text in a message
_READS_REASONING = ("reasoning_content", "thinking", "reasoning")


class Templates(Protocol):
    """What a checkpoint says of its conversations: a Tokenizer, or the outline of one."""

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def response_template(self) -> Mapping[str, object] | None: ...


@dataclass(frozen=True, slots=True)
class FoundRegions:
    """The regions of a checkpoint's answers, and how each was found: "named", "response_template", "table", "template"
    (analysed, with a warning), or "none".
    """

    spec: RegionSpec
    calls: str = "none"
    reasoning: str = "none"

    def facts(self) -> dict[str, dict[str, str | None]]:
        """The formats by name, None for none, and how they were found, as plain JSON values."""
        calls, reasoning = self.spec.calls, self.spec.reasoning
        return {
            "tool_calls": {"format": calls.name if calls else None, "found": self.calls},
            "reasoning": {"format": reasoning.name if reasoning else None, "found": self.reasoning},
        }


def facts_text(facts: Mapping[str, Mapping[str, str | None]]) -> str:
    """`FoundRegions.facts` in words."""
    named = {name.replace("_", " "): one for name, one in facts.items()}
    return ", ".join(
        f"{what} {one['format']} ({one['found']})" if one["format"] else f"no {what}"
        for what, one in named.items()
    )


@dataclass(frozen=True, slots=True)
class ModelRegions:
    """The regions of one model, the markers of its vocabulary, and how they were found."""

    found: FoundRegions
    markers: Markers

    @property
    def spec(self) -> RegionSpec:
        """How its answers are written."""
        return self.found.spec


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

    Raises ValueError naming the option for an unknown name.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    found = found_regions(tokenizer, template)
    spec = found.spec
    if tool_call_parser:
        spec = replace(spec, calls=_calls_named(tool_call_parser, tokenizer))
    if reasoning_parser:
        spec = replace(spec, reasoning=REASONING[reasoning_parser])
    found = FoundRegions(
        spec,
        "named" if tool_call_parser else found.calls,
        "named" if reasoning_parser else found.reasoning,
    )
    return ModelRegions(found, Markers.of(spec, tokenizer))


def _calls_named(name: str, tokenizer: Tokenizer) -> CallSpec:
    """The spec of a name; of those with several forms, the one whose marker is a token."""
    if name in VARIANTS:
        marker, with_it, without = VARIANTS[name]
        name = with_it if tokenizer.token_to_id(marker) is not None else without
    return CALLS[name]


def found_regions(checkpoint: Templates, template: str | None = None) -> FoundRegions:
    """What a checkpoint, or a template in place of its own, says of its answers."""
    if checkpoint.response_template is not None and template is None:
        declared = spec_of_response_template(checkpoint.response_template)
        if declared is not None:
            how = "response_template"
            return FoundRegions(
                declared, how if declared.calls else "none", how if declared.reasoning else "none"
            )
    templates = checkpoint.chat_templates if template is None else {"default": template}
    source = "\n".join(templates.values())
    if not source:
        return FoundRegions(RegionSpec())
    answers = _answers(templates, checkpoint.special_tokens)
    calls = _from_table(source, answers)
    reasoning = next((REASONING[name] for name, signs in REASONING_SIGNS if _has(source, signs)), None)
    how_calls, how_reasoning = ("none" if spec is None else "table" for spec in (calls, reasoning))
    if calls is None:
        calls = probed_calls(answers)
        if calls is not None and not _reads(calls, answers):
            calls = None
        if calls is not None:
            how_calls = "template"
            _warn("tool calls", f"{type(calls.call).__name__}, ", calls)
        elif NAMES[0] in answers.one:
            logger.warning(
                "the format of tool calls in the chat template is not known, so calls are returned as text; "
                "set --tool-call-parser to name the format"
            )
    if reasoning is None:
        reasoning = probed_reasoning(answers)
        if reasoning is not None:
            how_reasoning = "template"
            _warn("reasoning", "", reasoning)
    answer = ("<|START_RESPONSE|>", "<|END_RESPONSE|>") if "<|START_RESPONSE|>" in source else ("", "")
    if "<response>" in source and "</think>" in source:
        answer = ("<response>", "</response>")
    spec = RegionSpec(calls, _with_history(reasoning, source), answer)
    return FoundRegions(spec, how_calls, how_reasoning)


def _has(source: str, signs: Sequence[str]) -> bool:
    return all(sign in source for sign in signs)


def _answers(sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> Answers:
    try:
        templates = ChatTemplates(sources, special_tokens)
    except CheckpointError:
        return Answers("", "", "")

    def render(ask: ChatAsk) -> str:
        return templates.render(ask).text

    try:
        return Answers.of(render)
    except QuireError:
        return Answers("", "", "")


def _from_table(source: str, answers: Answers) -> CallSpec | None:
    """The first family whose signs the template has, and whose reader finds the calls in what it renders."""
    for name, signs in CALLS_SIGNS:
        if _has(source, signs):
            spec = CALLS[name]
            if not answers.one or _reads(spec, answers):
                return spec
    return None


def _reads(spec: CallSpec, answers: Answers) -> bool:
    """Whether a reader of the spec finds the calls of the probe in what the template made of them."""
    reasoning = REASONING["openai_gptoss"] if isinstance(spec.call, ChannelCall) else None
    for text, names in ((answers.one, NAMES[:1]), (answers.two, NAMES)):
        if not all(name in text for name in names):
            continue  # some templates write one call at most, some none
        parts = read_whole(RegionSpec(spec, reasoning), text, dict.fromkeys(names, PARAMETERS))
        calls = [part.text for part in parts if part.kind is PartKind.CALL]
        arguments = [json.loads(part.text) for part in parts if part.kind is PartKind.ARGUMENTS]
        if calls != [*names] or arguments != [ARGUMENTS] * len(names):
            return False
    return True


def _with_history(reasoning: ReasoningSpec | None, source: str) -> ReasoningSpec | None:
    """Where this template wants reasoning: in a field that it reads, else as the family does."""
    if reasoning is None or not any(name in source for name in _READS_REASONING):
        return reasoning
    return replace(reasoning, in_content=False)


def _warn(what: str, form: str, spec: CallSpec | ReasoningSpec) -> None:
    option = "--tool-call-parser" if form else "--reasoning-parser"
    logger.warning(
        "the chat template belongs to no known family. Format of its %s, found by rendering a probe: %sopener %r, "
        "closer %r. If it is wrong, set %s",
        what, form, spec.opener[:_SHOWN], spec.closer[:_SHOWN], option,
    )  # fmt: skip
