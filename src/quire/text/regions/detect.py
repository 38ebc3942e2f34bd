"""Find out which regions a model's answers have."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from quire.answers import PartKind
from quire.records import dataclass
from quire.text.chat_renderer import ChatAsk, ChatRenderer
from quire.text.regions.families import CALLS, CALLS_SIGNS, REASONING, REASONING_SIGNS, VARIANTS
from quire.text.regions.markers import Markers
from quire.text.regions.probe import ARGUMENTS, NAMES, PARAMETERS, Answers, probed_calls, probed_reasoning
from quire.text.regions.reader import read_whole
from quire.text.regions.response_template import spec_of_response_template
from quire.text.regions.spec import CallSpec, ChannelCall, History, ReasoningSpec, RegionSpec
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, QuireError

logger = logging.getLogger("quire.text")
_SHOWN = 60  # characters of a text in a message
_READS_REASONING = ("reasoning_content", "thinking", "reasoning")


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

    Raises ValueError naming the option for an unknown name.
    """
    sources = [template] if template is not None else list(tokenizer.chat_templates.values())
    found, source = _found(tokenizer, template, "\n".join(sources))
    calls, reasoning = found.calls, found.reasoning
    if tool_call_parser:
        calls = _named("tool_call_parser", tool_call_parser, CALLS, tokenizer)
    if reasoning_parser:
        reasoning = _named("reasoning_parser", reasoning_parser, REASONING, tokenizer)
    if tool_call_parser or reasoning_parser:
        source = "named"
    spec = RegionSpec(calls, reasoning, found.answer)
    return ModelRegions(spec, Markers.of(spec, tokenizer), source)


def _named(option: str, name: str, table: dict[str, Any], tokenizer: Tokenizer) -> Any:
    """The spec of a name; of those with several forms, the one whose marker is a token."""
    if name in VARIANTS and option == "tool_call_parser":
        marker, with_it, without = VARIANTS[name]
        name = with_it if tokenizer.token_to_id(marker) is not None else without
    if name not in table:
        names = sorted({*table, *(VARIANTS if option == "tool_call_parser" else ())})
        raise ValueError(f"{option}: {name!r} is not one of {', '.join(names)}")
    return table[name]


def _found(tokenizer: Tokenizer, template: str | None, source: str) -> tuple[RegionSpec, str]:
    """The spec of a checkpoint, and where it comes from."""
    if tokenizer.response_template is not None and template is None:
        declared = spec_of_response_template(tokenizer.response_template)
        if declared is not None:
            return declared, "response_template"
    if not source:
        return RegionSpec(), "none"
    answers = _answers(tokenizer, template)
    calls = _from_table(source, answers)
    reasoning = next((REASONING[name] for name, signs in REASONING_SIGNS if _has(source, signs)), None)
    how = "table" if calls is not None or reasoning is not None else "none"
    if calls is None:
        calls = probed_calls(answers)
        if calls is not None and not _reads(calls, answers):
            calls = None
        if calls is not None:
            how = "template"
            _warn("tool calls", f"{type(calls.call).__name__}, ", calls)
        elif NAMES[0] in answers.one:
            logger.warning(
                "the format of tool calls in the chat template is not known, so calls are returned as text; "
                "set --tool-call-parser to name the format"
            )
    if reasoning is None:
        reasoning = probed_reasoning(answers)
        if reasoning is not None:
            how = "template"
            _warn("reasoning", "", reasoning)
    answer = ("<|START_RESPONSE|>", "<|END_RESPONSE|>") if "<|START_RESPONSE|>" in source else ("", "")
    if "<response>" in source and "</think>" in source:
        answer = ("<response>", "</response>")
    return RegionSpec(calls, _with_history(reasoning, source), answer), how


def _has(source: str, signs: Sequence[str]) -> bool:
    return all(sign in source for sign in signs)


def _answers(tokenizer: Tokenizer, template: str | None) -> Answers:
    try:
        renderer = ChatRenderer(tokenizer, template=template)
    except CheckpointError:
        return Answers("", "", "")

    def render(ask: ChatAsk) -> str:
        return renderer.render(ask).text

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
    return ReasoningSpec(
        name=reasoning.name,
        opener=reasoning.opener,
        closer=reasoning.closer,
        at_calls=reasoning.at_calls,
        channel=reasoning.channel,
        history=History.FIELD,
    )


def _warn(what: str, form: str, spec: CallSpec | ReasoningSpec) -> None:
    option = "--tool-call-parser" if form else "--reasoning-parser"
    logger.warning(
        "the chat template belongs to no known family. Format of its %s, found by rendering a probe: %sopener %r, "
        "closer %r. If it is wrong, set %s",
        what, form, spec.opener[:_SHOWN], spec.closer[:_SHOWN], option,
    )  # fmt: skip
