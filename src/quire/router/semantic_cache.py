"""Answers to questions that are nearly the same as earlier ones, without a server: off unless asked for.

A question goes to a server of embeddings, and its vector is compared with those of earlier questions of the same key:
client's tenant, model, parameters, tools and conversation before it. See routing/question_marks for what else has to be
the same, semantic_request for what may be answered at all, docs/router.md and decisions/0179.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np

from quire.config.routing import read_key
from quire.config.semantic import SemanticOptions
from quire.router.semantic_request import PATH, ChatQuestion, answer_body, chat_question, kept_chat, packed
from quire.routing.near_answers import Near, NearAnswers, Vector
from quire.routing.question_marks import marks_of
from quire.server.exchange import Exchange
from quire.server.fleet.shadows import SeenAnswer
from quire.server.logs import log
from quire.types import QuireError
from quire.util.http_client import Client, ClientError, Whole, target

_MOST_VECTOR = 256 * 1024  # bytes of an answer of the server of embeddings
_MODELS = 1000  # whose weights are remembered
_PAUSE = 1.0  # seconds without questions after that server failed
_HEADER, _SIMILARITY = b"x-quire-semantic-cache", b"x-quire-semantic-similarity"


class VectorError(QuireError):
    """The server of embeddings gave no vector."""


class SemanticAsk:
    """A question on its way, with its vector once that is known. `looks`: its client takes an answer that was kept."""

    def __init__(self, question: ChatQuestion, *, looks: bool) -> None:
        self.question, self.looks = question, looks
        self.vector: Vector | None = None
        self.marks = b""
        self.space = "", 0


class SemanticCache:
    """The answers of a router. Raises ValueError for an address that is none, or a key file without a key."""

    OUTCOMES = ("hit", "miss", "refused", "ineligible", "failed")

    def __init__(self, options: SemanticOptions, collected: int, most_answer: int) -> None:
        """Up to so many answers are collected at a time, each up to so many bytes; others are not kept."""
        self._options = options
        self._most_collected, self.most_answer = collected, most_answer
        headers = {}
        if options.key_file:
            headers["authorization"] = f"Bearer {read_key('semantic_cache: key-file', options.key_file)}"
        try:
            self._client = Client(target(options.url, headers), connect_timeout=options.timeout)
        except ValueError as error:
            raise ValueError(f"semantic_cache: {error}") from None
        self._weights: OrderedDict[str, str] = OrderedDict()  # fingerprint of the newest answer by model
        self.outcomes: Counter[str] = Counter()
        self._space: tuple[str, int] = "", 0  # what made the vectors, and how long they are
        self._empty()
        self._paused_until = 0.0
        self._collected = 0

    def _empty(self) -> None:
        self.answers = NearAnswers(self._options.size, self._options.threshold, self._options.seconds)

    def asked(self, exchange: Exchange, body: bytes, *, has_keys: bool, renamed: bool) -> SemanticAsk | None:
        """A request that may be answered, or whose answer may be kept; None for any other one.

        `has_keys`: the router knows its clients by their keys, else servers do. `renamed`: it asks for a name that
        stands for several models.
        """
        if exchange.path != PATH:
            return None
        control = {part.strip().lower() for part in exchange.header(b"cache-control").split(",")}
        if "no-store" in control:
            self.outcomes["refused"] += 1
            return None
        keys = () if has_keys else (exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        domain = hashlib.sha256(msgspec.json.encode([exchange.tenant, *keys])).digest()
        packs = "msgpack" in exchange.header(b"content-type") + exchange.header(b"accept")
        question = None
        if not renamed and not packs:
            question = chat_question(body, domain, sampled=self._options.sampled)
        if question is None:
            self.outcomes["ineligible"] += 1
            return None
        return SemanticAsk(question, looks="no-cache" not in control)

    async def answer(self, exchange: Exchange, asked: SemanticAsk) -> bool:
        """Answer a request if there is an answer; false if a server has to be asked."""
        outcome, found = await self._find(asked)
        body = None if found is None else answer_body(found.answer, asked.question)
        if found is None or body is None:
            self.outcomes[outcome] += 1
            exchange.add_headers([(_HEADER, outcome.encode())])
            return False
        self.outcomes["hit"] += 1
        headers = [(_HEADER, b"hit"), (_SIMILARITY, b"%.4f" % min(found.similarity, 1.0))]
        kind = b"text/event-stream; charset=utf-8" if asked.question.stream else b"application/json"
        await exchange.respond(200, body, content_type=kind, headers=headers)
        return True

    async def _find(self, asked: SemanticAsk) -> tuple[str, Near | None]:
        """What is there for a request, which gets its vector here; the outcome if that is nothing."""
        now = time.monotonic()
        if now < self._paused_until:
            return "failed", None
        try:
            async with asyncio.timeout(self._options.timeout):
                asked.vector = await self._vector(asked.question.text)
        except (TimeoutError, ClientError, VectorError) as error:
            self._paused_until = now + _PAUSE
            log.warning("semantic cache: no vector: %s", error or "not in time")
            return "failed", None
        if asked.vector is None:
            return "ineligible", None
        asked.marks, asked.space = marks_of(asked.question.text), self._space
        if not asked.looks:
            return "refused", None
        return "miss", self._known(asked.question, asked.vector, asked.marks)

    def _known(self, question: ChatQuestion, vector: Vector, marks: bytes) -> Near | None:
        weights = self._weights.get(question.model)
        return self.answers.find(question.key, vector, marks, weights, time.monotonic())

    async def _vector(self, text: str) -> Vector | None:
        """The vector of a text, of length one; None for a text that the server refuses, such as one that is too long.

        Raises ClientError or VectorError.
        """
        answer = Whole(_MOST_VECTOR)
        await self._client.post(
            "/v1/embeddings", msgspec.json.encode({"input": text, "encoding_format": "base64"}), answer
        )
        if answer.status == 400:
            return None
        if answer.status != 200:
            raise VectorError(f"HTTP {answer.status}")
        try:
            made: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
            numbers = made["data"][0]["embedding"]
            raw = np.frombuffer(base64.b64decode(numbers), "<f4") if isinstance(numbers, str) else numbers
            vector = np.asarray(raw, np.float32)
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
            raise VectorError(f"not an answer with a vector: {error}") from None
        length = float(np.linalg.norm(vector)) if vector.ndim == 1 and vector.size else 0.0
        if not 0 < length < np.inf:
            raise VectorError("the vector has no length")
        space = str(made.get("model", "")), vector.size
        if space != self._space:  # vectors of another model are not comparable
            self._space = space
            self._empty()
        return vector / np.float32(length)

    def may_collect(self, asked: SemanticAsk) -> bool:
        """Whether the answer of a server is collected; `end` then has to follow."""
        if asked.vector is None or self._collected >= self._most_collected:
            return False
        self._collected += 1
        return True

    def end(self, asked: SemanticAsk, seen: SeenAnswer | None, status: int) -> None:
        """A collected answer has come to its end, or has not; keep it if it is one."""
        self._collected -= 1
        question, vector = asked.question, asked.vector
        if seen is None or vector is None or status != 200 or not 0 < len(seen.body) <= self.most_answer:
            return
        chat = kept_chat(bytes(seen.body), stream=question.stream)
        if chat is not None and asked.space == self._space:
            self._weights[question.model] = chat.fingerprint
            self._weights.move_to_end(question.model)
            if len(self._weights) > _MODELS:
                self._weights.popitem(last=False)
            self.answers.keep(
                question.key, vector, asked.marks, packed(chat), chat.fingerprint, time.monotonic()
            )

    async def stop(self) -> None:
        """Hang up."""
        await self._client.close()
