"""Render chat messages with the checkpoint's template, with the result of transformers' apply_chat_template."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta

from quire.records import dataclass
from quire.text import chat_messages as shapes
from quire.text.content import ContentForm, content_form, takes_json_arguments, takes_thinking_parts
from quire.text.meter import LimitExceededError, Meter, TemplateLimits
from quire.text.provenance import TemplateText, concat, own_spans
from quire.text.sandbox import ChatSandbox, TemplateRefusal
from quire.text.tokenizer import Tokenizer
from quire.types import CheckpointError, RequestError
from quire.util.strict_json import read_small_file

MAX_TEMPLATE_BYTES = 2**20

# Variables of the renderer; a request may not pass these as template arguments.
_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
    )
)
# Roles that a template may make part of a control token ("<|" + role + "|>"): the caller chooses the role.
_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation")
)
# Errors of jinja2 and its filters for unsuitable values.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RuntimeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """One conversation to render.

    `tools` and `documents` are lists of JSON objects; `chat_template_kwargs` are additional variables of the template
    (enable_thinking, …), as is `reasoning_effort`. `add_generation_prompt` opens the assistant's turn;
    `continue_final_message` leaves the last message open instead, so that the model continues it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt. `own` are the character ranges that the template wrote itself, ascending: control tokens are recognised
    only there; see Tokenizer.encode_guarded.
    """

    text: str
    own: tuple[tuple[int, int], ...] = ()


class _Compiled(NamedTuple):
    """What follows from the source of a template alone."""

    sandbox: ChatSandbox
    template: jinja2.Template
    variables: frozenset[str]
    form: ContentForm
    json_arguments: bool
    thinking_parts: bool


@lru_cache(2)  # a server renders with the templates whose answers it analyses: "default" and "tool_use"
def _compiled(source: str, now: Callable[[], datetime]) -> _Compiled:
    sandbox = ChatSandbox(now)
    tree = sandbox.parse(source)
    variables = frozenset(meta.find_undeclared_variables(tree))
    form, json_arguments = content_form(tree), takes_json_arguments(tree)
    thinking_parts = takes_thinking_parts(tree)
    return _Compiled(sandbox, sandbox.from_string(tree), variables, form, json_arguments, thinking_parts)


class ChatTemplate:
    """One compiled template. Safe to render from several threads at once. `thought` is what stands around the reasoning
    of earlier turns, if they are part of the content.

    Raises CheckpointError if the source exceeds the limit or does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.limits = limits or TemplateLimits()
        self._special_tokens = {name: TemplateText(text) for name, text in (special_tokens or {}).items()}
        if len(source) > self.limits.source_chars:
            raise CheckpointError(
                f"the chat template has {len(source)} characters, more than the limit of {self.limits.source_chars}"
            )
        self.thought: tuple[str, str] | None = None
        try:
            made = _compiled(source, now)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise CheckpointError(f"the chat template does not compile{where}: {_short(error)}") from None
        self._sandbox, self._compiled = made.sandbox, made.template
        self._form, self._json_arguments = made.form, made.json_arguments
        self._thinking_parts = made.thinking_parts
        self.variables = made.variables

    @property
    def arguments(self) -> frozenset[str]:
        """Variables that a conversation may set."""
        return self.variables - _RESERVED - set(self._special_tokens) - set(self._sandbox.globals)

    @property
    def template_hash(self) -> str:
        """SHA-256 of the source, in hex."""
        return hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()

    def render(self, ask: ChatAsk, limits: shapes.MessageLimits | None = None) -> RenderedChat:
        """Render the prompt for one conversation.

        Raises RequestError for messages that are malformed, too large or refused by the template, CheckpointError for a
        template that breaks the sandbox or its limits.
        """
        copier = shapes.PlainCopier(limits or shapes.MessageLimits())
        values = self._variables_of(ask, copier, limits or shapes.MessageLimits())
        tag = ""
        if ask.continue_final_message:
            tag = shapes.free_tag(values)
            _tag_final_message(values["messages"], tag)
        text = self._run({**self._special_tokens, **values}, 8 * copier.nodes + copier.chars // 2)
        if tag:
            text = _cut_at_tag(text, tag)
        return RenderedChat(str.__str__(text), own_spans(text))

    def _variables_of(
        self, ask: ChatAsk, copier: shapes.PlainCopier, limits: shapes.MessageLimits
    ) -> dict[str, Any]:
        if ask.continue_final_message and ask.add_generation_prompt:
            raise RequestError("continue_final_message", "cannot be combined with add_generation_prompt")
        values = dict(self._template_kwargs(ask, copier))
        messages = shapes.check_messages(ask.messages, copier, limits)
        if self._thinking_parts:
            shapes.part_reasoning(messages)
        else:
            shapes.gather_reasoning(messages)
        if self._form is ContentForm.STRING:
            shapes.flatten(messages)
        elif self._form is ContentForm.PARTS:
            shapes.wrap(messages)
        if not self._json_arguments:
            shapes.parse_arguments(messages)
        if self.thought is not None:
            _think_in_content(messages, *map(TemplateText, self.thought))
        for message in messages:
            if message["role"] in _ROLES:
                message["role"] = TemplateText(message["role"])
        values["messages"] = messages
        if ask.documents and "documents" not in self.variables:
            raise RequestError("documents", "this model's chat template does not read documents")
        values["tools"] = _objects("tools", ask.tools, copier)
        values["documents"] = _objects("documents", ask.documents, copier)
        values["add_generation_prompt"] = bool(ask.add_generation_prompt)
        return values

    def _template_kwargs(self, ask: ChatAsk, copier: shapes.PlainCopier) -> dict[str, Any]:
        given = {name: ("chat_template_kwargs", value) for name, value in ask.chat_template_kwargs.items()}
        if ask.reasoning_effort is not None:
            given.setdefault("reasoning_effort", ("reasoning_effort", ask.reasoning_effort))
        for name, (field_name, _) in given.items():
            if name in _RESERVED or name not in self.variables:
                known = ", ".join(sorted(self.arguments)) or "none"
                raise RequestError(
                    field_name, f"{name!r} is not an argument of this template, which reads {known}"
                )
        return {name: copier.copy(field_name, value) for name, (field_name, value) in given.items()}

    def _run(self, values: dict[str, Any], input_size: int) -> str:
        parts: list[str] = []
        size = 0
        try:
            with self._sandbox.metered(Meter(self.limits, input_size)):
                for part in self._compiled.generate(values):
                    size += len(part)
                    if size > self.limits.output_chars:
                        raise RequestError(
                            "messages",
                            f"the rendered prompt exceeds the limit of {self.limits.output_chars} characters",
                        )
                    parts.append(part)
        except TemplateRefusal as refusal:
            raise RequestError("messages", f"the chat template refuses them: {_short(refusal)}") from None
        except LimitExceededError as error:
            raise CheckpointError(f"the chat template was stopped: {error}") from None
        except (
            jinja2.exceptions.SecurityError,
            RecursionError,
            MemoryError,
            jinja2.TemplateNotFound,
        ) as error:
            raise CheckpointError(
                f"the chat template was stopped: {_short(error) or type(error).__name__}"
            ) from None
        except _FAILURES as error:
            raise RequestError("messages", f"the chat template cannot render them: {_short(error)}") from None
        return concat(parts)


class ChatTemplates:
    """The templates of a checkpoint: renders with "tool_use" if it exists and there are tools, else with "default".

    Raises CheckpointError if there is no chat template, or no default among several.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if not sources:
            raise CheckpointError(
                "this model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): use text completion, or pass a template"
            )
        if "default" not in sources:
            raise CheckpointError(
                f"this model has chat templates {sorted(sources)} but none named 'default'; pass one"
            )
        self._templates = {
            name: ChatTemplate(source, special_tokens=special_tokens, limits=limits, now=now)
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }

    @property
    def template_hash(self) -> str:
        """SHA-256 of the default template's source, in hex, for comparing deployments."""
        return self._templates["default"].template_hash

    @property
    def source(self) -> str:
        """The default template."""
        return self._templates["default"].source

    @property
    def arguments(self) -> frozenset[str]:
        """Variables of the default template that a conversation may set."""
        return self._templates["default"].arguments

    def write_thoughts(self, opener: str, closer: str) -> None:
        """Write the reasoning of earlier turns into their contents, between these texts."""
        for template in self._templates.values():
            template.thought = opener, closer

    @property
    def reads_tools(self) -> bool:
        """Whether the model sees the tools of a conversation."""
        return "tool_use" in self._templates or "tools" in self._templates["default"].variables

    def render(self, ask: ChatAsk) -> RenderedChat:
        """Render the prompt text; raises like ChatTemplate.render."""
        named = "tool_use" if ask.tools and "tool_use" in self._templates else "default"
        return self._templates[named].render(ask)


class ChatRenderer(ChatTemplates):
    """The templates of a tokenizer, or one in their place, and the token ids of what they render."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        limits: TemplateLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        sources = tokenizer.chat_templates if template is None else {"default": template}
        super().__init__(sources, tokenizer.special_tokens, limits=limits, now=now)
        self._tokenizer = tokenizer

    def encode(self, ask: ChatAsk) -> list[int]:
        """Render the token ids of the prompt. Control tokens spelled in the caller's text are encoded as text."""
        chat = self.render(ask)
        return self._tokenizer.encode_guarded(chat.text, chat.own)


def read_template(template: str | Path | None) -> str | None:
    """A chat template, given as a file or as its text. Raises CheckpointError when the file cannot be read."""
    if template is None or (isinstance(template, str) and ("{{" in template or "{%" in template)):
        return template
    try:
        return read_small_file(Path(template), MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{template}: not UTF-8") from None


def _objects(
    name: str, items: Sequence[Mapping[str, Any]] | None, copier: shapes.PlainCopier
) -> list[Any] | None:
    if items is None:
        return None
    if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
        raise RequestError(name, "must be a list of objects")
    copied: list[Any] = copier.copy(name, items)
    return copied


def _think_in_content(messages: list[shapes.Message], opener: TemplateText, closer: TemplateText) -> None:
    for message in messages:
        if message["role"] == "assistant" and (thought := message.get("reasoning_content")):
            thought = opener + thought + closer
            if isinstance(content := message.get("content") or "", str):
                message["content"] = thought + content
            else:
                content.insert(0, {"type": "text", "text": thought})


def _tag_final_message(messages: list[shapes.Message], tag: str) -> None:
    """Append the tag to the text to be continued. The space after it shows whether the template trims."""
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + tag + " "
    elif content and "text" in content[-1]:
        content[-1]["text"] += tag + " "
    else:
        raise RequestError("continue_final_message", "the last message ends with no text to continue")


def _cut_at_tag(text: str, tag: str) -> str:
    for spelled in (tag, shapes.escaped(tag)):
        position = text.rfind(spelled)
        if position >= 0:
            cut = text[:position]
            return cut if text.startswith(" ", position + len(spelled)) else cut.rstrip()
    raise RequestError("continue_final_message", "the chat template changes the text of the last message")


def _short(error: BaseException) -> str:
    text = str(getattr(error, "message", None) or error)  # jinja2's str() adds source lines
    return text if len(text) <= 500 else text[:500] + "…"
