"""Check a model's files: digests, NaN, infinity and holes in weights, and whether the parts match."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.types import CheckpointError, QuireError, RequestError
from quire.util.printable import printable, printable_lines
from quire.util.progress import ByteProgress
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.engine.build.opening import Model
    from quire.loader import Source
    from quire.loader.scan import Advance
    from quire.spec import ModelFacts
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")
_WEIGHTS = {".safetensors", ".gguf"}
MAX_REPORT_BYTES = 64 * 2**20
_PROBE = "The quick brown fox — 42 naïve façades, 你好, 🦊\n\ttab"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint folder, GGUF file, or a hub name such as organisation/name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--digests",
        metavar="FILE",
        help="the --json output of an earlier run: files must have the same content",
    )
    parser.add_argument(
        "--no-weights", action="store_true", help="do not read the weights, only their headers"
    )
    parser.add_argument("--quiet", "--no-progress", action="store_true", help="no progress bar")


@dataclass
class VerifyReport:
    """The findings. `checks` are {"check", "status", "message"}; status is ok, warning or failed."""

    model: str
    files: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, str]] = field(default_factory=list)

    def add(self, check: str, status: str, message: str = "") -> None:
        self.checks.append({"check": check, "status": status, "message": message})

    def attempt(self, check: str, make: Callable[[], tuple[T, str]]) -> T | None:
        """Run `make` and report its message. If it raises, the check fails with the error and the result is None."""
        try:
            made, message = make()
        except QuireError as error:
            self.add(check, "failed", str(error))
            return None
        self.add(check, "ok", message)
        return made

    @property
    def ok(self) -> bool:
        return not any(check["status"] == "failed" for check in self.checks)


def run(args: argparse.Namespace) -> int:
    """Run the checks; exit status 1 if one failed, else 0, also with warnings."""
    from quire.loader import resolve_model
    from quire.store.gguf_names import shards

    path = resolve_model(args.model)
    before = _read_digests(Path(args.digests)) if args.digests else None
    report = VerifyReport(str(path))
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else shards(path)
    weights = [file for file in files if file.suffix in _WEIGHTS or path.is_file()]
    if args.no_weights:
        files = [file for file in files if file not in weights]
        before = before and {
            name: digest for name, digest in before.items() if Path(name).suffix not in _WEIGHTS
        }
    total = sum(file.stat().st_size for file in [*files, *([] if args.no_weights else weights)])
    with ByteProgress("verifying", enabled=not args.quiet) as bar:
        advance = _counter(bar, total)
        _files(report, files, before, advance)
        model = _config(report, path)
        _weights(report, path, model, None if args.no_weights else advance)
    _text(report, path, model)
    _show(report, as_json=args.json)
    return 0 if report.ok else 1


def _counter(bar: ByteProgress, total: int) -> Advance:
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        bar(min(done, total), total)

    return advance


def _read_digests(path: Path) -> dict[str, str]:
    from quire.util.strict_json import read_json_object

    files = read_json_object(path, MAX_REPORT_BYTES).get("files")
    if not isinstance(files, list):
        raise CheckpointError(
            f"{path.name}: files: expected a list; is this the output of quire verify --json?"
        )
    found = {}
    for entry in files:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "sha256")):
            raise CheckpointError(f"{path.name}: files: an entry has no name and sha256")
        found[entry["name"]] = entry["sha256"]
    return found


def _files(
    report: VerifyReport, files: Iterable[Path], before: dict[str, str] | None, advance: Advance | None
) -> None:
    """Compare the digest of every file with the hub's blob names and an earlier report."""
    from quire.loader.scan import compare_digests, file_digests, promised_digest

    wrong, promised = [], 0
    for path in files:
        digests = file_digests(path, advance)
        entry: dict[str, Any] = {
            "name": path.name, "bytes": path.stat().st_size, "sha256": digests["sha256"]
        }  # fmt: skip
        promise = promised_digest(path)
        if promise is not None and promise[0] in digests:
            promised += 1
            entry["as_downloaded"] = digests[promise[0]] == promise[1]
            if not entry["as_downloaded"]:
                wrong.append(
                    f"{path.name}: {promise[0]} is {digests[promise[0]]}, but the hub's is {promise[1]}"
                )
        report.files.append(entry)
    if before is not None:
        now = {entry["name"]: entry["sha256"] for entry in report.files}
        changed = compare_digests(now, before)
        report.add(
            "digests", "failed" if changed else "ok", "; ".join(changed) or "equal to the earlier report"
        )
    status = "failed" if wrong else "ok"
    found = f"{promised} files equal to the hub's" if promised else f"{len(report.files)} files read"
    report.add("files", status, "; ".join(wrong) or found)


def _config(report: VerifyReport, path: Path) -> Model | None:
    from quire.engine.build.opening import open_model

    def read() -> tuple[Model, str]:
        model = open_model(path, tokenizer=False)
        facts = model.facts
        return model, f"{facts.architecture}, {len(facts.spec.layers)} layers, vocabulary {facts.spec.vocab}"

    model = report.attempt("config", read)
    for notice in model.facts.notices if model else ():
        report.add("config", "warning", notice)
    return model


def _weights(report: VerifyReport, path: Path, model: Model | None, advance: Advance | None) -> None:
    """Check headers, names and shapes against the config, and every number if `advance` is given."""
    from quire.engine.build.assemble import open_weights
    from quire.loader import Checkpoint, LoadRules
    from quire.loader.load import check_tensors
    from quire.program.formats import NumberFormats
    from quire.program.lower import lower

    if model is None and path.is_file():  # the earlier check covers the tensors of its header
        return

    def check() -> tuple[None, str]:
        with open_weights(model) if model else Checkpoint(path) as source:
            names = list(source.names())
            found = f"{len(names)} tensors"
            if advance is not None:
                _scan(report, source, advance)
            if model is None:
                return None, found
            facts = model.facts
            rules = LoadRules.of(facts.spec, quantized=facts.quantization is not None)
            skipped = check_tensors(lower(facts.spec, NumberFormats()).params, source, rules)
        return None, found + (f", {len(skipped)} ignored" if skipped else ", all as the config implies")

    report.attempt("tensors", check)


def _scan(report: VerifyReport, source: Source, advance: Advance) -> None:
    from quire.loader.scan import scan_source

    found = scan_source(source, advance)
    for finding in found:
        status = "failed" if finding.fatal else "warning"
        report.add("weights", status, f"{finding.tensor}: {finding.message}")
    if not found:
        report.add("weights", "ok", "no NaN, infinity or hole")


def _text(report: VerifyReport, path: Path, model: Model | None) -> None:
    """Check the tokenizer against the vocabulary, special tokens, and a turn with the chat template."""
    from quire.engine.build.opening import open_model
    from quire.text.chat_renderer import ChatAsk, ChatRenderer

    if model is None:  # without a config there is no vocabulary to compare with
        return

    def read() -> tuple[Tokenizer | None, str]:
        found = open_model(path).tokenizer
        return (
            found,
            f"{found.vocab_size} tokens" if found else "none: the model takes token ids only",
        )

    tokenizer = report.attempt("tokenizer", read)
    if tokenizer is None:
        return
    try:
        back = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False))
    except RequestError as error:
        report.add("tokenizer", "warning", error.message)
        return
    if model.facts.pooling is not None:
        return  # it generates nothing: many of its tokenizers fold case, and none has to end a text
    if back.strip() != _PROBE.strip():
        report.add("tokenizer", "warning", "decoding the tokens of a text does not give the same text")
    _special_tokens(report, tokenizer.eos_token_id, model.facts)

    def render() -> tuple[None, str]:
        ask = ChatAsk(messages=[{"role": "user", "content": "Hello"}])
        return None, f"{len(ChatRenderer(tokenizer).encode(ask))} tokens for one short message"

    if tokenizer.chat_templates:
        report.attempt("chat template", render)


def _special_tokens(report: VerifyReport, eos: int | None, facts: ModelFacts) -> None:
    """Check that the tokenizer's end of sequence ends a generation."""
    ends = facts.generation.eos_token_ids
    if eos is not None and ends and eos not in ends:
        listed = ", ".join(map(str, ends))
        report.add("tokenizer", "warning", f"its end of sequence is {eos}, generation ends at {listed}")
    elif not ends:
        report.add(
            "tokenizer", "warning", "no config names an end-of-sequence token, so texts end by length only"
        )


def _show(report: VerifyReport, *, as_json: bool) -> None:
    if as_json:
        whole = {"model": report.model, "ok": report.ok, "files": report.files, "checks": report.checks}
        json.dump(whole, sys.stdout)
        print()
        return
    print(printable(report.model))
    for entry in report.files:
        print(f"  {entry['sha256']}  {format_size(entry['bytes']):>11}  {printable(entry['name'])}")
    for check in report.checks:
        message = printable_lines(check["message"])
        print(f"{check['status']:<8} {check['check']}{': ' if message else ''}{message}")
    print("ok" if report.ok else "failed")
