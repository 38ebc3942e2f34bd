"""Compilers of JSON schemas, each in a process of its own: python engines.py SECONDS ENGINE VOCABULARY [TOKENIZER].

Reads a line of JSON for each schema, with an answer and texts to judge, all in tokens, and writes what came of them.
The kernel ends it after so much processor time for one schema.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

MEMORY = 4 * 2**30


class Guidance:
    """llguidance behind Quire's compiler, or with its own."""

    def __init__(self, pieces: list[bytes], tokenizer: str, *, quire: bool) -> None:
        from quire.structured.grammar_tokens import GrammarTokens
        from quire.text.token_bytes import TokenBytes
        from quire.text.tokenizer import Tokenizer

        self.ll, self.quire = import_module("llguidance"), quire
        packed = TokenBytes.of(pieces)
        self.trie = GrammarTokens(packed, Tokenizer.from_dir(Path(tokenizer)) if tokenizer else None).trie

    def compile(self, schema: str) -> Any:
        from quire.structured.ask import StructuredOutput
        from quire.structured.compile import compile_grammar
        from quire.structured.grammar_limits import parser_limits

        if self.quire:
            source = compile_grammar(StructuredOutput(json=schema)).grammar.source
            made = self.ll.LLMatcher(self.trie, source, log_level=0, limits=parser_limits())
        else:
            source = json.dumps({"grammars": [{"json_schema": json.loads(schema)}]})
            made = self.ll.LLMatcher(self.trie, source, log_level=0)
        if made.is_error():
            raise ValueError(made.get_error())
        return made

    def start(self, made: Any) -> Any:
        return made.deep_copy()

    def mask(self, state: Any) -> None:
        state.compute_bitmask()

    def step(self, state: Any, token: int) -> bool:
        return bool(state.try_consume_tokens([token]))

    def complete(self, state: Any) -> bool:
        return bool(state.is_accepting())


class XGrammar:
    """xgrammar without `strict_mode`, which forbids properties that a schema does not name."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.xg, self.end = import_module("xgrammar"), len(pieces)
        info = self.xg.TokenizerInfo([*pieces, b"</s>"], self.xg.VocabType.RAW, stop_token_ids=[self.end])
        self.compiler = self.xg.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.line = self.xg.allocate_token_bitmask(1, info.vocab_size)

    def compile(self, schema: str) -> Any:
        return self.compiler.compile_json_schema(schema, strict_mode=False)

    def start(self, made: Any) -> Any:
        return self.xg.GrammarMatcher(made)

    def mask(self, state: Any) -> None:
        state.fill_next_token_bitmask(self.line)

    def step(self, state: Any, token: int) -> bool:
        return bool(state.accept_token(token))

    def complete(self, state: Any) -> bool:
        return bool(state.accept_token(self.end))


class Outlines:
    """outlines-core: a regular expression of the schema, and its index over the vocabulary."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.core, self.schemas = import_module("outlines_core"), import_module("outlines_core.json_schema")
        ids: dict[bytes, list[int]] = {}
        for token, piece in enumerate(pieces):
            ids.setdefault(piece, []).append(token)
        ids.pop(b"", None)
        self.vocabulary = self.core.Vocabulary(len(pieces), ids)
        self.line = array("I", bytes(4 * (len(pieces) // 32 + 1)))

    def compile(self, schema: str) -> Any:
        return self.core.Index(self.schemas.build_regex_from_schema(schema), self.vocabulary)

    def start(self, made: Any) -> Any:
        return self.core.Guide(made)

    def mask(self, state: Any) -> None:
        state.write_mask_into(self.line.buffer_info()[0], len(self.line), 4)

    def step(self, state: Any, token: int) -> bool:
        try:
            state.advance(token, return_tokens=False)
        except ValueError:
            return False
        return True

    def complete(self, state: Any) -> bool:
        return bool(state.is_finished())


def work(seconds: float, name: str, vocabulary: str, tokenizer: str) -> None:
    """Serve until the standard input ends."""
    pieces = [piece.encode("latin-1") for piece in json.loads(Path(vocabulary).read_text())]
    engine: Any
    if name in {"xgrammar", "outlines-core"}:
        engine = XGrammar(pieces) if name == "xgrammar" else Outlines(pieces)
    else:
        engine = Guidance(pieces, tokenizer, quire=name == "quire")

    def accepts(text: Sequence[int]) -> bool:
        state = engine.start(made)
        return all(engine.step(state, token) for token in text) and engine.complete(state)

    engine.mask(engine.start(engine.compile('{"type": "integer"}')))  # imports
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        began = time.thread_time()
        try:
            made = engine.compile(asked["schema"])
            engine.mask(engine.start(made))
        except Exception as error:  # whatever a library raises is its refusal
            print(json.dumps({"end": "refused", "why": str(error)[:200]}), flush=True)
            continue
        found: dict[str, Any] = {"end": "", "compile": time.thread_time() - began, "masks": []}
        state = engine.start(made)
        for token in asked["answer"]:
            start = time.thread_time()
            engine.mask(state)
            found["masks"].append(time.thread_time() - start)
            if not engine.step(state, token):
                break
        found["accepted"] = [any(map(accepts, texts)) for texts in asked["values"]]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    work(float(sys.argv[1]), sys.argv[2], sys.argv[3], "".join(sys.argv[4:]))
