"""What grammars cost, and what jump-forward saves: streams with a schema each beside streams without.

    python benchmarks/structured.py [quire-mini | shape:qwen3-0.6b] [--streams 32] [--tokens 96] [--runs 5]
        [--processor] [--keys named | open | repeated]

Rates are output tokens per second, in turns: without grammars, with a schema each (forced tokens sampled, and added at
once), and half of the streams of each kind. `one stream` is its rate with jump-forward relative to one without a
grammar, and times 1 - f, where f is the share of its tokens that the schema forces. A forced token is not free: in a
chunk it is one more row of every linear layer. `at best` is the rate if that were all: if a step took what it takes
without a grammar, and the forward pass of a chunk what it takes more than one of a token. `mask and step` is the time
that a step spends on masks and on stepping over its tokens, per row. A shape has no tokenizer: its vocabulary is made
up.

With --keys open, objects have keys that the schema does not name and that come once; with repeated they may come again.
What unique keys cost is the difference between the two.

With --processor the engine has one thread, and time is that of the process on processors: for a machine that others
load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from quire.bench.engine_run import open_bench_model
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import Built, build
from quire.engine.core import EngineCore
from quire.structured.json_schema import compile_json_schema
from quire.structured.stepping import GrammarStepper
from quire.text.token_bytes import TokenBytes
from quire.types import Grammar, Request, SamplingParams, TokenIds

SYLLABLES = ["ba", "ce", "di", "fo", "gu", "na", "me", "or", "der", "id", "ti", "tle", "ag", "st"]


def schema(number: int, names: int = 4) -> dict[str, Any]:
    """An array of objects with names of its own: it has no end before the stream has."""
    rng = random.Random(number)
    keys = ["_".join(rng.choices(SYLLABLES, k=3)) + str(number) for _ in range(names)]
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 12},
        {"type": "integer", "minimum": 0, "maximum": 10**6},
        {"type": "boolean"},
        {"enum": ["small", "medium", "large"]},
    ]
    item = {
        "type": "object",
        "properties": {key: rng.choice(kinds) for key in keys},
        "required": keys,
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 10_000, "x-guidance": {"whitespace_flexible": False}}


def grammar_of(number: int, keys: str) -> Grammar:
    if keys == "named":
        source = json.dumps({"grammars": [{"json_schema": schema(number)}]})
    else:
        item = {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "propertyNames": {"maxLength": 12},
        }
        array_of = {"type": "array", "items": item, "minItems": 1000 + number}
        source = compile_json_schema(array_of, whitespace=False).source
        if keys == "repeated":
            source = source.partition("\n")[2]  # without the line that says what is followed
    return Grammar(source, hashlib.sha256(source.encode()).digest())


def made_up_pieces(size: int) -> TokenBytes:
    """All bytes, punctuation of JSON, and words."""
    rng = random.Random(0)
    found = dict.fromkeys([bytes([byte]) for byte in range(256)])
    while len(found) < size:
        word = "".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))
        found[rng.choice(["", " ", '"', '{"', ',"', "_", " "]).encode() + word.encode()] = None
        found["".join(rng.choices('{}[]":,0123456789.- ', k=rng.randint(2, 4))).encode()] = None
    pieces = [*found][:size]
    return TokenBytes.of(pieces)


class Timed:
    """The Grammars of an engine, with the time that they take."""

    def __init__(self, stepper: GrammarStepper, clock: Callable[[], float]) -> None:
        self._stepper, self._clock = stepper, clock
        self.prepare = stepper.prepare
        self.seconds, self.rows = 0.0, 0
        self.added_tokens = self.late_steps = 0
        self.passes: list[tuple[int, float]] = []  # tokens and seconds of each forward pass
        self._tokens, self._began = 0, 0.0

    def begin(self, out: Any) -> None:
        self._stepper.begin(out)
        self._tokens, self._began = sum(len(item.token_ids) for item in out.scheduled), self._clock()

    def masks(self) -> Any:
        start = self._clock()
        self.passes.append((self._tokens, start - self._began))
        made = self._stepper.masks()
        self.seconds += self._clock() - start
        self.rows += len(made)
        return made

    def advance(self, out: Any, result: Any) -> Any:
        start = self._clock()
        added = self._stepper.advance(out, result)
        self.seconds += self._clock() - start
        return added


class Bench:
    def __init__(
        self, model: str, streams: int, tokens: int, *, prompt: int, processor: bool, keys: str
    ) -> None:
        asked = EngineConfig(max_num_seqs=2 * streams, max_model_len=1024, grammar_memory=2**30)
        if processor:
            asked = asked.replace(threads=1)
        self.clock = time.process_time if processor else time.perf_counter
        opened, asked = open_bench_model(model, asked, tokenizer=True)
        self.built: Built = build(opened, asked)
        vocab, tokenizer = self.built.program.vocab, self.built.model.tokenizer
        self.pieces = made_up_pieces(vocab) if tokenizer is None else tokenizer.all_bytes(vocab)
        self.grammars = [grammar_of(number, keys) for number in range(streams)]
        self.streams, self.tokens, self.prompt, self.number = streams, tokens, prompt, 0
        self.steppers = {jump: self._stepper(jump) for jump in (False, True)}
        self.compile_ms = {jump: self._compile(stepper) for jump, stepper in self.steppers.items()}

    def _stepper(self, jump: bool) -> GrammarStepper:
        threads = self.built.config.threads
        rows = self.built.plan.limits.max_logit_rows
        tokenizer = self.built.model.tokenizer
        return GrammarStepper(
            lambda: tokenizer, 2**30, self.built.program.vocab, rows, threads=threads, jump=jump
        )

    def _compile(self, stepper: GrammarStepper) -> list[float]:
        found = []
        for grammar in self.grammars:
            start = time.perf_counter()
            while not stepper.prepare(grammar, self.pieces):
                time.sleep(0.0001)
            found.append((time.perf_counter() - start) * 1e3)
        return found

    def run(self, constrained: int, free: int, *, jump: bool = False, tokens: int = 0) -> dict[str, Any]:
        """Streams to their end; the rate over all steps behind the prompts."""
        timed = Timed(self.steppers[jump], self.clock)
        core = EngineCore(self.built.core.scheduler, self.built.core.worker, grammars=timed)
        core.vocabulary = self.pieces
        rng, made = random.Random(1), 0
        for stream in range(constrained + free):
            self.number += 1
            grammar = self.grammars[stream] if stream < constrained else None
            params = SamplingParams(
                max_tokens=tokens or self.tokens, seed=stream, ignore_eos=True, temperature=0.8
            )
            prompt = [rng.randrange(260, 1000) for _ in range(self.prompt)]
            core.add(
                Request(
                    request_id=str(self.number), prompt_token_ids=TokenIds(prompt), params=params,
                    namespace=str(self.number), grammar=grammar, stepwise=grammar is not None,
                )
            )  # fmt: skip
        start, begun = 0.0, 0
        while core.has_work():
            events = core.step()
            if start:
                made += sum(len(event.new_token_ids) for event in events)
            elif len(core.started) == 0:
                start, begun = self.clock(), len(timed.passes)
        seconds = self.clock() - start
        return {
            "rate": made / seconds,
            "made": made,
            "passes": timed.passes[begun:],
            "mask_us": timed.seconds / max(1, timed.rows) * 1e6,
        }


def passes(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Seconds of a forward pass by its tokens: the median."""
    by_tokens: dict[int, list[float]] = {}
    for run in runs:
        for tokens, seconds in run["passes"]:
            by_tokens.setdefault(tokens, []).append(seconds)
    return {tokens: statistics.median(found) for tokens, found in by_tokens.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--without-mixed", action="store_true")
    parser.add_argument("--processor", action="store_true", help="processor time of one thread")
    parser.add_argument("--keys", choices=("named", "open", "repeated"), default="named")
    asked = parser.parse_args()
    bench = Bench(
        asked.model,
        asked.streams,
        asked.tokens,
        prompt=asked.prompt,
        processor=asked.processor,
        keys=asked.keys,
    )
    half = asked.streams
    kinds: dict[str, tuple[int, int, bool]] = {
        "free": (0, half, False),
        "sampled": (half, 0, False),
        "jump": (half, 0, True),
        "mixed": (half, half, True),
        "free twice": (0, 2 * half, False),
        "one free": (0, 1, False),
        "one jump": (1, 0, True),
    }
    if asked.without_mixed:
        del kinds["mixed"], kinds["free twice"]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(asked.runs):
        for kind, (constrained, free, jump) in kinds.items():
            found[kind].append(bench.run(constrained, free, jump=jump))

    def ratio(kind: str, base: str) -> float:
        pairs = zip(found[kind], found[base], strict=True)
        return float(statistics.median(run["rate"] / other["rate"] for run, other in pairs))

    first = found["one jump"][0]
    sampled, made = len(first["passes"]), first["made"]
    forced = 1 - sampled / made
    chunks, one = passes(found["one jump"]), passes(found["one free"])[1]
    more = [chunks[tokens] - one for tokens, _ in first["passes"] if tokens > 1]
    step = 1 / statistics.median(run["rate"] for run in found["one free"])
    report = {
        "model": asked.model,
        "rates": {kind: statistics.median(run["rate"] for run in runs) for kind, runs in found.items()},
        "32 constrained, of free": {"sampled": ratio("sampled", "free"), "jump": ratio("jump", "free")},
        "32 and 32, of 64 free": None if asked.without_mixed else ratio("mixed", "free twice"),
        "one stream": {
            "forced": forced,
            "rate, of free": ratio("one jump", "one free"),
            "times 1 - f": ratio("one jump", "one free") * (1 - forced),
            "at best": made * step / (sampled * step + sum(more)),
            "forward, ms by tokens": {tokens: seconds * 1e3 for tokens, seconds in sorted(chunks.items())},
        },
        "mask and step, us per row": statistics.median(run["mask_us"] for run in found["sampled"]),
        "compile ms, median": statistics.median(bench.compile_ms[True]),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
