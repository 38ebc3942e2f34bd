"""Send requests over HTTP: a turn becomes a body, the events of the answer become a record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from quire.bench.endpoints import Endpoint, Event, RequestOptions, SentPrompt, error_message
from quire.bench.sse import StreamError
from quire.bench.timeline import RequestRecord
from quire.bench.workloads import Speller, Turn
from quire.util.http_client import Client, ClientError, Whole


class AnswerReader:
    """Reads the answer to one request into its record as it arrives; the AnswerSink of that request.

    A failure raises ClientError, which ends the request.
    """

    def __init__(self, endpoint: Endpoint, record: RequestRecord, *, stream: bool) -> None:
        self.text: list[str] = []
        self._endpoint, self._record = endpoint, record
        self._decoder = endpoint.decoder()
        self._stream = stream
        self._whole = Whole()
        self._whole_wanted = False
        self._length = 0  # characters so far, if every part repeats them
        self._pending = 0  # counted tokens since the last chunk with text
        self._told = 0
        self._counted = True  # every chunk had a token count
        self._final: Event | None = None

    def start(self, status: int, headers: dict[str, str]) -> None:
        self._record.status = status
        self._whole.start(status, headers)
        kind = headers.get("content-type", "")
        self._whole_wanted = (
            status != 200
            or not self._stream
            or ("json" in kind and "ndjson" not in kind and not self._endpoint.lines)
        )

    def data(self, chunk: bytes, at: float) -> None:
        if self._whole_wanted:
            self._whole.data(chunk, at)
            return
        try:
            for data in self._decoder.feed(chunk):
                event = self._endpoint.event(data)
                if event is not None:
                    self._take(event, at)
        except StreamError as error:
            raise ClientError(str(error)) from None

    def end(self, at: float) -> None:
        """End the answer. Raises ClientError if it is an error or incomplete."""
        record = self._record
        if record.status != 200:
            raise ClientError(error_message(record.status, self._whole.body))
        if self._whole_wanted:
            record.streamed = False
            try:
                event = self._endpoint.event(self._whole.body)
            except StreamError as error:
                raise ClientError(str(error)) from None
            if event is not None:
                self._take(event, at)
        if record.finished is None and not record.times:
            raise ClientError("empty answer: no token and no finish reason")
        if not record.finish_reason:
            raise ClientError("answer cut off: the stream ended without a finish reason")
        self._settle()

    def _take(self, event: Event, at: float) -> None:
        record = self._record
        if event.error:
            raise ClientError(f"error in the stream: {' '.join(event.error.split())[:200]}")
        text = event.text
        if self._endpoint.cumulative:
            text, self._length = text[self._length :], max(self._length, len(text))
        if event.tokens is not None:
            self._pending += event.tokens
        elif event.total is not None and event.total > self._told + self._pending:
            self._pending = event.total - self._told
        if text:
            self.text.append(text)
            record.times.append(at)
            record.counts.append(self._pending)
            self._counted = self._counted and self._pending > 0
            self._told += self._pending
            self._pending = 0
        if event.finish:
            record.finish_reason = event.finish
        if text or event.finish:
            record.finished = at
        for name in ("input_tokens", "output_tokens", "cached_tokens"):
            value = getattr(event, name)
            if isinstance(value, int):
                setattr(record, name, value)
        if event.server:
            record.server = event.server

    def _settle(self) -> None:
        record = self._record
        if not self._counted:
            record.counts = []
        elif self._pending and record.counts and self._told + self._pending == record.output_tokens:
            # The last tokens had no text (an end mark, half a character): they arrived with the finish reason.
            record.times.append(record.finished or record.times[-1])
            record.counts.append(self._pending)
        if record.input_tokens is not None:
            record.input_source = "server"
        if record.output_tokens is not None:
            record.output_source = "server"
        elif record.counts:
            record.output_tokens, record.output_source = sum(record.counts), "server"


class HttpSender:
    """Sends turns to one endpoint of one server. `counter` counts tokens of a text if the server does not."""

    def __init__(
        self,
        client: Client,
        endpoint: Endpoint,
        ask: RequestOptions,
        speller: Speller,
        counter: Callable[[str], int] | None = None,
    ) -> None:
        if speller.ids is not None and not endpoint.ids:
            raise ValueError(f"prompt-format: {endpoint.name} takes no token ids")
        self.client, self.endpoint, self.ask, self.speller = client, endpoint, ask, speller
        self.chunks = self.words = 0
        self.sample_errors: dict[str, str] = {}
        self._counter = counter

    async def send(self, turn: Turn, history: list[str], record: RequestRecord) -> str:
        """See Sender. This turn's prompt is appended to `history`; times are on the clock of the client."""
        prompt, told = self._prompt(turn, history)
        ask = dataclasses.replace(self.ask, max_tokens=turn.output_tokens or self.ask.max_tokens)
        body = json.dumps(self.endpoint.body(prompt, ask), ensure_ascii=False).encode()
        answer = AnswerReader(self.endpoint, record, stream=ask.stream)

        def sent(at: float) -> None:
            record.sent = at

        try:
            await self.client.post(self.endpoint.route(stream=ask.stream), body, answer, sent)
            answer.end(self.client.clock())
        except ClientError as error:
            self._failed(record, str(error))
        text = "".join(answer.text)
        self.chunks += len(record.times)
        self.words += text.count(" ") + 1 if text else 0
        if not record.failed:
            self._count(record, prompt, text)
            history.append(told)
        return text

    def _prompt(self, turn: Turn, history: list[str]) -> tuple[SentPrompt, str]:
        """The prompt to send, and this turn's text for the history of the next."""
        if turn.messages:
            if self.endpoint.chat:
                return SentPrompt(messages=list(turn.messages)), ""
            return SentPrompt(text="\n".join(str(m.get("content", "")) for m in turn.messages)), ""
        if self.speller.ids is not None and turn.pieces:
            return SentPrompt(token_ids=self.speller.token_ids(turn.pieces)), ""
        text = turn.text or self.speller.text(turn.pieces, first=not history)
        if self.endpoint.chat:
            messages: list[dict[str, Any]] = [
                {"role": "assistant" if i % 2 else "user", "content": said} for i, said in enumerate(history)
            ]
            return SentPrompt(messages=[*messages, {"role": "user", "content": text}]), text
        return SentPrompt(text="\n".join([*history, text])), text

    def _count(self, record: RequestRecord, prompt: SentPrompt, text: str) -> None:
        """Fill in the counts that the server did not report."""
        if record.output_tokens is None and self._counter is not None:
            record.output_tokens, record.output_source = self._counter(text), "tokenizer"
        if record.output_tokens is None and record.streamed:
            record.output_tokens, record.output_source = len(record.times), "chunks"
        if record.input_tokens is None and prompt.token_ids is not None:
            record.input_tokens, record.input_source = len(prompt.token_ids), "tokenizer"
        if record.input_tokens is None and self._counter is not None:
            whole = prompt.text or "\n".join(str(m.get("content", "")) for m in prompt.messages or ())
            record.input_tokens, record.input_source = self._counter(whole), "tokenizer"

    def _failed(self, record: RequestRecord, message: str) -> None:
        """Write the kind of a failure into the record; keep the first full message of each kind."""
        kind = message.partition(":")[0]
        self.sample_errors.setdefault(kind, message)
        record.error = kind
