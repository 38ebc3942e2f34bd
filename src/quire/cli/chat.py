"""Chat with a model. Type a message and press return; /help lists the commands, Ctrl-D exits."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.answers import PartKind
from quire.cli.adapter_option import adapter_fields, add_adapter_option, chosen_adapter, take_adapter_name
from quire.cli.generate import engine_fields
from quire.cli.kv_quality import check_kv_quality
from quire.cli.notices import notice
from quire.cli.options import (
    add_chat_options,
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    answer_fields,
    chat_fields,
    engine_config,
    named_model,
    sampling_params,
    structure,
)
from quire.cli.prompt import COMMANDS, LEAVE, ChatInput
from quire.cli.streamed_markdown import StreamedMarkdown
from quire.cli.tools import ChatTools, chat_tools
from quire.outputs import CompletionOutput
from quire.types import ContextLengthError, QuireError, RequestError, SamplingParams
from quire.util.printable import printable_lines

if TYPE_CHECKING:
    from quire.engine.sync_engine import TextDelta
    from quire.llm import LLM

# Share of the context that is free after the oldest turns are dropped.
ROOM = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--quiet", action="store_true", help="no progress, no memory report, no tokens/s")
    parser.add_argument(
        "--no-history", action="store_true", help="do not save the input history for the next chat"
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        help="functions as in the API, in JSON; the next line is the result of a call",
    )
    parser.add_argument(
        "--mcp",
        metavar="FILE",
        help="tool servers of the Model Context Protocol, in JSON; see docs/structured.md",
    )
    add_adapter_option(parser)
    add_sampling_options(parser)
    add_chat_options(parser)
    add_engine_options(parser, seed=False)


def run(args: argparse.Namespace) -> int:
    from quire.llm import LLM

    take_adapter_name(args)
    structured = structure(args)
    name: str | None = named_model(args.model, quiet=args.quiet)
    fields = {**engine_fields(args), **adapter_fields(args)}
    with chat_tools(args) as tools, ChatInput(keep=not args.no_history) as prompt:
        messages: Sequence[dict[str, Any]] = ()
        adapter = chosen_adapter(args)
        while name is not None:
            check_kv_quality(name, engine_config(args), quiet=args.quiet)
            with LLM(name, progress=not args.quiet, **answer_fields(args), **fields) as llm:
                if not args.quiet:
                    notice(llm)
                params = sampling_params(args, llm.default_params(), structured)
                options = {**chat_fields(args), "adapter": adapter}
                chat = Chat(llm, params, prompt, args.system, quiet=args.quiet, tools=tools, options=options)
                chat.go_on(messages)
                if prompt.interactive and not args.quiet:
                    print("/help lists the commands, Ctrl-D exits.", file=sys.stderr)
                while (line := prompt.read()) is not None and chat.take(line):
                    pass
            name, messages = chat.wanted, chat.messages
            fields, adapter = engine_fields(args), ""  # adapters belong to the first model
    return 0


class Chat:
    """A conversation with a model, rendered with `options`, of which `adapter` names the adapter that answers. An
    interrupted answer stays in the conversation.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        prompt: ChatInput,
        system: str | None,
        *,
        quiet: bool,
        tools: ChatTools | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._llm, self._params, self._prompt = llm, params, prompt
        self._start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._tools, self._quiet = tools, quiet
        self._options = dict(options or {})
        self._adapter = self._options.pop("adapter", "")
        self._rates = prompt.interactive and not quiet
        self._markdown: StreamedMarkdown | None = None
        self.wanted: str | None = None  # the model to go on with

    def take(self, line: str) -> bool:
        """Process a line of input; False if it ends the chat."""
        if line in LEAVE:
            return False
        if line.startswith("/"):
            self._command(line)
            return self.wanted is None
        if line.strip():
            self._messages.append({"role": "user", "content": line})
            self._answer()
        return True

    def _command(self, line: str) -> None:
        if line == "/help":
            for name, text in COMMANDS.items():
                _tell(f"  {name:<9}{text}")
        elif line == "/clear":
            self._messages = list(self._start)
        elif line == "/drop":
            if not self._drop_oldest():
                _tell("no earlier turn to drop")
        elif line.split(maxsplit=1)[0] == "/system":
            text = line.removeprefix("/system").strip()
            self._start = [{"role": "system", "content": text}] if text else []
            self._messages = list(self._start)
        elif line.split(maxsplit=1)[0] == "/model":
            self._change_model(line.removeprefix("/model").strip())
        elif line.split(maxsplit=1)[0] == "/save":
            self._save(line.removeprefix("/save").strip())
        else:
            _tell(
                f"unknown command {line.split(maxsplit=1)[0]}; see /help, or begin with a space to send it as text"
            )

    def _change_model(self, name: str) -> None:
        """Go on with another model, or say which one answers."""
        if not name:
            _tell(str(self._llm.built.model.folder))
            return
        from quire.engine.build.opening import open_model

        try:
            found = named_model(name, quiet=self._quiet)
            open_model(found)  # what cannot be read is refused while the present model still answers
        except (OSError, QuireError, ValueError) as error:
            _tell(str(error))
        else:
            self.wanted = found

    def go_on(self, messages: Sequence[dict[str, Any]]) -> None:
        """Take over a conversation."""
        self._messages = list(messages) or self._messages

    @property
    def messages(self) -> Sequence[dict[str, Any]]:
        return self._messages

    def _save(self, name: str) -> None:
        """Write the conversation to a new file."""
        if not name:
            _tell("/save needs the name of a file")
            return
        if name.endswith(".json"):
            text = json.dumps(self._messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n\n".join(f"**{one['role']}**\n\n{one['content']}" for one in self._messages) + "\n"
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            _tell(f"{name}: {error.strerror}")
        else:
            _tell(f"{len(self._messages)} messages in {name}")

    def _answer(self) -> None:
        """Answer the last message, with calls of functions in between. A refused message is removed."""
        asked = self._last_question()
        rounds = 1 if self._tools is None else self._tools.rounds
        while rounds:
            try:
                reply = self._generate()
            except ContextLengthError as error:
                if self._make_room(error):
                    asked = self._last_question()
                    continue
                del self._messages[asked:]
                return
            except RequestError as error:
                del self._messages[asked:]
                _tell(str(error))
                return
            rounds -= 1
            self._messages.append(reply)
            if self._tools is None or not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                self._messages.append(self._called(self._tools, call))
        if self._tools is not None:
            _tell(f"stopped: {self._tools.rounds} rounds of calls without an answer")

    def _last_question(self) -> int:
        """The position of the last message of the user, which the present turn answers."""
        return max(i for i, message in enumerate(self._messages) if message["role"] == "user")

    def _called(self, tools: ChatTools, call: dict[str, Any]) -> dict[str, Any]:
        """Show a call, and return its result as a message."""
        function = call["function"]
        _tell(f"→ {function['name']}({function['arguments']})")
        if function["name"] in tools.typed:
            text = self._prompt.result(function["name"]) or ""
        else:
            text = tools.call(function["name"], function["arguments"])
            _tell(f"← {text}")
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": text}

    def _generate(self) -> dict[str, Any]:
        """The next message of the assistant."""
        given = {"adapter": self._adapter} | ({} if self._tools is None else {"tools": self._tools.tools})
        stream = self._llm.stream_chat(self._messages, self._params, **given, **self._options)
        started = time.perf_counter()
        first = started
        self._markdown = _markdown()
        try:
            with stream:
                for delta in stream:
                    first = time.perf_counter() if first == started else first
                    self._show(delta)
        except KeyboardInterrupt:
            pass  # the text so far stays in the conversation
        (sample,) = stream.output.outputs
        if self._markdown is not None:
            self._markdown.end()
        print(flush=True)
        self._report(stream.output.usage.completion_tokens, first - started, time.perf_counter() - first)
        used = stream.output.usage.prompt_tokens + stream.output.usage.completion_tokens
        if used >= self._window:
            _tell(f"the answer was cut off: the context of {self._window} tokens is full")
        return _message(sample)

    def _show(self, delta: TextDelta) -> None:
        """Text goes to standard output, reasoning beside it."""
        if not self._quiet:
            for part in delta.parts or ():
                if part.kind is PartKind.REASONING:
                    print(_dim(printable_lines(part.text)), end="", file=sys.stderr, flush=True)
        if self._markdown is None:
            print(delta.text, end="", flush=True)
        else:
            self._markdown.feed(delta.text)
            sys.stdout.flush()

    def _report(self, tokens: int, wait: float, seconds: float) -> None:
        if self._rates and tokens > 1:
            _tell(
                f"[{tokens} tokens, the first after {wait:.2f} s, then {(tokens - 1) / seconds:.1f} tokens/s]"
            )

    @property
    def _window(self) -> int:
        return self._llm.built.plan.limits.max_len

    def _make_room(self, error: ContextLengthError) -> bool:
        """Ask what to drop when the conversation no longer fits; True if it fits afterwards."""
        _tell(str(error))
        asked = self._last_question()
        if not self._prompt.interactive or asked == len(self._start):
            return False
        choice = self._prompt.ask("Drop the oldest turns, clear the conversation, or cancel? [d/c/N] ")
        if choice == "c":
            self._messages = [*self._start, *self._messages[asked:]]
            return True
        if choice != "d":
            return False
        room = int((1 - ROOM) * self._window)
        while self._drop_oldest() and len(self._llm.encode_chat(self._messages, **self._options)) > room:
            pass
        return True

    def _drop_oldest(self) -> bool:
        """Drop the oldest user message and its answer. False if it is the only one."""
        turns = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        unanswered = bool(self._messages) and self._messages[-1]["role"] in {"user", "tool"}
        if len(turns) < 1 + unanswered:
            return False
        end = turns[1] if len(turns) > 1 else len(self._messages)
        del self._messages[turns[0] : end]
        return True


def _markdown() -> StreamedMarkdown | None:
    """What renders an answer, if a person reads it; whatever else reads it gets the text as it is."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return StreamedMarkdown(sys.stdout.write, min(100, shutil.get_terminal_size().columns))


def _message(sample: CompletionOutput) -> dict[str, Any]:
    """A sample as the message that goes on in the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": sample.text}
    if sample.reasoning:
        message["reasoning_content"] = sample.reasoning
    if sample.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in sample.tool_calls
        ]
    return message


def _tell(text: str) -> None:
    text = printable_lines(text)
    print(_dim(text) if sys.stderr.isatty() else f"quire: {text}", file=sys.stderr, flush=True)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text
