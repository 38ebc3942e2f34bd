"""Compiled grammars: made one at a time off the step loop, kept by digest within a number of bytes."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from quire.structured.grammar_limits import MAX_SOURCE_BYTES, grammar_bytes, parser_limits
from quire.structured.grammar_tokens import GrammarTokens
from quire.structured.unique_needs import UniqueNeeds
from quire.structured.unique_texts import UniqueTexts
from quire.structured.unique_tokens import UniqueTokens
from quire.text.token_bytes import TokenBytes
from quire.types import Grammar, QuireError, RequestError
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.text.tokenizer import Tokenizer  # imports the library of tokenizers

# Not the lowest priority: the thread holds the interpreter lock at times, and the step loop would wait for it.
NICE = 10
MAX_ERRORS = 1024  # kept for requests that may have been aborted


class Prototypes:
    """Matchers that were never stepped, from which those of sequences are copied.

    `tokenizer` is called once, when the first grammar is compiled, with `pieces`. Grammars are charged to `memory`; one
    for which there is no room beside those in use (`pin`) waits. The thread of the step loop calls the methods.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer | None], memory: int) -> None:
        self.pieces: TokenBytes | None = None  # before the first grammar
        self._tokenizer, self._memory = tokenizer, memory
        self._tokens: GrammarTokens | None = None
        self._unique_tokens: UniqueTokens | None = None  # before the first grammar that needs them
        self._made: OrderedDict[bytes, LLMatcher] = OrderedDict()  # the least recently used first
        self._charges: dict[bytes, int] = {}  # of those made, and of the one that is compiled
        self._errors: dict[bytes, str] = {}  # of grammars that could not be compiled, until it is asked for
        self._pins: Counter[bytes] = Counter()
        self._compiling: tuple[bytes, Future[LLMatcher]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.compiled = 0

    def get(self, grammar: Grammar) -> LLMatcher | None:
        """The prototype of a grammar; None while it waits or is compiled: ask again.

        Raises RequestError if it cannot be compiled, or would never have room.
        """
        digest = grammar.digest
        if self._compiling is not None and self._compiling[1].done():
            self._take()
        if error := self._errors.pop(digest, ""):
            raise RequestError("grammar", error)
        if (found := self._made.get(digest)) is not None:
            self._made.move_to_end(digest)
            return found
        self._check(grammar)
        if self._compiling is None and self._make_room(grammar_bytes(grammar.source)):
            self._start(grammar)
        return None

    def pin(self, digest: bytes) -> None:
        """Keep a prototype for one more sequence."""
        self._pins[digest] += 1

    def unpin(self, digest: bytes) -> None:
        """A sequence needs a prototype no more."""
        self._pins[digest] -= 1
        if not self._pins[digest]:
            del self._pins[digest]

    def drop(self, digest: bytes) -> None:
        """Forget a prototype; copies of it stay valid."""
        if self._made.pop(digest, None) is not None:
            del self._charges[digest]

    def _check(self, grammar: Grammar) -> None:
        size, charge = len(grammar.source), grammar_bytes(grammar.source)
        if size > MAX_SOURCE_BYTES:
            limit = format_size(MAX_SOURCE_BYTES)
            raise RequestError("grammar", f"{format_size(size)} of rules exceed the limit of {limit}")
        if not self._memory:
            raise RequestError("grammar", "the memory bound leaves no room for grammars (--grammar-memory)")
        if charge > self._memory:
            raise RequestError(
                "grammar",
                f"it may take {format_size(charge)}, over the limit of {format_size(self._memory)} (--grammar-memory)",
            )

    def _make_room(self, needed: int) -> bool:
        """Forget prototypes that no sequence uses until there is room; false if there is not."""
        free = self._memory - sum(self._charges.values())
        idle = [digest for digest in self._made if digest not in self._pins]
        if free + sum(self._charges[digest] for digest in idle) < needed:
            return False
        while free < needed:
            digest = idle.pop(0)
            free += self._charges[digest]
            self.drop(digest)
        return True

    def _start(self, grammar: Grammar) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars", initializer=yield_to_others)
        self._charges[grammar.digest] = grammar_bytes(grammar.source)
        self._compiling = grammar.digest, self._thread.submit(self._compile, grammar)

    def _take(self) -> None:
        assert self._compiling is not None
        (digest, future), self._compiling = self._compiling, None
        self.compiled += 1
        try:
            made = future.result()
            error = made.get_error().partition("\n")[0]
        except QuireError as failure:  # of the tokenizer
            error = str(failure)
        if error:
            if len(self._errors) == MAX_ERRORS:
                self._errors.clear()
            self._errors[digest] = error
            del self._charges[digest]
        else:
            self._made[digest] = made

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher; for other threads than that of the step loop. Errors of a grammar are in its matcher."""
        from llguidance import LLMatcher

        if self._tokens is None:
            assert self.pieces is not None
            self._tokens = GrammarTokens(self.pieces, self._tokenizer())
        if self._unique_tokens is None and UniqueNeeds.of(grammar.source) is not None:
            assert self.pieces is not None
            self._unique_tokens = UniqueTokens(self.pieces, self._tokens.trie)
        return LLMatcher(self._tokens.trie, grammar.source, log_level=0, limits=parser_limits())

    def unique(self, grammar: Grammar) -> UniqueTexts | None:
        """What the output of a compiled grammar must keep to besides; for a sequence of its own."""
        needs = UniqueNeeds.of(grammar.source)
        if needs is None:
            return None
        assert self._unique_tokens is not None
        return UniqueTexts(self._unique_tokens, needs)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        made = self.compile(grammar)
        if not made.is_error():
            made.deep_copy().compute_bitmask()  # fills the lexer that all copies share, off the step loop
        return made


def yield_to_others() -> None:
    """Let the step loop run before this thread."""
    if hasattr(os, "sched_setscheduler"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
