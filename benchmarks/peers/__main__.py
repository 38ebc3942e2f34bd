"""Run the same work on Quire and on other engines, in turns, and write one table.

    python -m benchmarks.peers                                    everything, for hours
    python -m benchmarks.peers --prepare                          install engines and make model files only
    python -m benchmarks.peers --shape tiny --peers quire,transformers --rounds 1 --work decode,c8

Installs what is missing under build/peers first. In each round every engine does every workload in a process of its
own, one after another, with the machine's limits measured before and after each; figures are medians over the rounds.
Each finished process is a line of the --runs file: run the command again after an interruption, or with more --rounds,
and it goes on from there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers import runs, summary, workloads
from benchmarks.peers.burst import plain
from benchmarks.peers.engines import ENGINES, PeerError, Place, measured_command
from benchmarks.peers.runs import Unit
from benchmarks.peers.table import markdown

from quire.bench import results
from quire.bench.random_checkpoint import write_checkpoint
from quire.bench.recording import Recording
from quire.planner import shapes
from quire.util.platform import usable_cores

ROOT = Path(__file__).parents[2]
TINY = {
    **shapes.SHAPES["llama-3.2-1b"], "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048,
    "max_position_embeddings": 4096,
}  # fmt: skip
DEFINITIONS = {
    "decode": "128 tokens in, 128 out, one request: (n - 1) / (time of the last token - time of the first), tokens/s",
    "prefill": "1,024 tokens in, one out, one request: 1,024 / its time, tokens/s",
    "cN": "N requests of 128 tokens in, 128 out at once: output tokens / time of the whole run, tokens/s",
    "first": "from the start of the engine's process to the first token of a prompt of 128, files in the page cache",
    "memory": "most resident MiB of the engine's process, mapped files included",
    "by limits": "the same ratio of shares of the bound, each of the limits measured around its own runs",
    "bound": "what the machine's limits measured around Quire's runs allow: each step takes the longer of moving its "
    "weights (in Quire's format), keys and values and computing; for cN one step of all prompts, then 127 of N rows",
}
MODELS = dict[tuple[str, str], Path]  # (engine, its format) -> what its script gets as --model


def main() -> int:
    args = arguments()
    place = Place(args.folder.resolve())
    recording = Recording("peers", ["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    model = checkpoint(place, args.shape)
    if not args.report:
        models, notes = prepare(place, model, args)
        if args.prepare:
            print("\n".join(notes))
            return 0
        for number in range(args.rounds):
            for unit in units(args, models, number):
                measure(unit, place, models, args)
    write(recording, place, model, args)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "names between commas"
    parser.add_argument("--shape", choices=["tiny", *shapes.SHAPES], default="qwen3-0.6b")
    parser.add_argument("--peers", type=_words, default=list(ENGINES), metavar="NAME,…", help=words)
    parser.add_argument(
        "--formats", type=_words, default=["bf16", "int8", "int4"], metavar="NAME,…", help=words
    )
    parser.add_argument(
        "--work", type=_works, default=_works("decode,prefill,c8,c32,first"), metavar="NAME,…",
        help=f"{words}; NAME+NAME: in one process, one after another, for engines that are slow to start",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds in all, those of the --runs file included"
    )
    parser.add_argument(
        "--contenders", type=float, default=0.0, metavar="PART",
        help="repeat only peers that reached this part of the best one's figure, such as 0.8 (default: all)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument(
        "--prefix", type=shlex.split, default=[], metavar="COMMAND",
        help="put before each measured process, such as 'taskset -c 0-3', 'numactl -N 0 -m 0' or 'chrt -r 50'",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prepare", action="store_true", help="install and convert, measure nothing")
    what.add_argument(
        "--report", action="store_true", help="write the table of the --runs file, measure nothing"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "peers", help="environments and model files"
    )
    parser.add_argument("--runs", type=Path, help="what was measured (default: SHAPE.jsonl in --folder)")
    parser.add_argument(
        "--out", type=Path, help="the result, and beside it the table as .md (default: as --runs)"
    )
    args = parser.parse_args()
    args.runs = args.runs or args.folder / f"{args.shape}.jsonl"
    args.out = args.out or args.runs.with_suffix(".json")
    for name in args.peers:
        if name not in ENGINES:
            parser.error(f"--peers: {name!r} is not one of {', '.join(ENGINES)}")
    return args


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _works(text: str) -> list[tuple[str, ...]]:
    """Groups of workloads: those of a group share a process."""
    groups = [tuple(word.split("+")) for word in _words(text)]
    for group in groups:
        for work in group:
            try:
                workloads.check_work(work)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        if "first" in group and len(group) > 1:
            raise argparse.ArgumentTypeError("work: 'first' needs a process of its own")
    return groups


def checkpoint(place: Place, shape: str) -> Path:
    """The random-weight checkpoint that every engine's files are made of."""
    folder = place.root / "models" / shape
    if not (folder / "model.safetensors").exists():
        say(f"writing {shape} with random weights")
        write_checkpoint(folder, TINY if shape == "tiny" else shapes.config(shape), merges=True)
    return folder


def prepare(place: Place, model: Path, args: argparse.Namespace) -> tuple[MODELS, list[str]]:
    """Install and convert; what can be measured, and what cannot and why."""
    models: MODELS = {}
    notes: list[str] = []
    for name in args.peers:
        engine = ENGINES[name]
        try:
            say(f"{name}: environment")
            engine.install(place)
        except PeerError as error:
            notes.append(f"{name}: left out: {error}")
            say(notes[-1])
            continue
        for form in (own for asked in args.formats for own in engine.formats.get(asked, ())):
            try:
                models[name, form] = engine.prepare(place, model, form)
            except PeerError as error:
                notes.append(f"{name} {form}: left out: {error}")
                say(notes[-1])
    return models, notes


def units(args: argparse.Namespace, models: MODELS, number: int) -> list[Unit]:
    """The processes of one round: for each work and format all engines, beginning with another one each round."""
    found = []
    for works in args.work:
        for form in args.formats:
            ready = [
                Unit(number, name, form, own, works)
                for name in args.peers
                for own in ENGINES[name].formats.get(form, ())
                if (name, own) in models
            ]
            first = number % len(ready) if ready else 0
            found += ready[first:] + ready[:first]
    return found


def measure(unit: Unit, place: Place, models: MODELS, args: argparse.Namespace) -> None:
    """Measure one process, unless its figures are there or no longer matter, and write them down."""
    rows = runs.read(args.runs)
    if runs.done(rows, unit) or (unit.round and not runs.contends(rows, unit, args.contenders)):
        return
    say(str(unit))
    engine, files = ENGINES[unit.engine], models[unit.engine, unit.its_format]
    command = measured_command(engine, place, files, unit.its_format, unit.works, args.threads, unit.round)
    asked = {
        "command": command, "environment": engine.environment(place), "threads": args.threads,
        "touch": [str(files)] if "first" in unit.works else [],
    }  # fmt: skip
    words = [*args.prefix, sys.executable, "-m", "benchmarks.peers.burst", json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"error": f"the measured process ended with {done.returncode}: {plain(done.stderr)}"}
    new = [{**row, "version": summary.version(engine, place)} for row in runs.rows_of(unit, found)]
    runs.append(args.runs, new)
    for row in new:
        say(f"  {row['work']}: {row['value']:.1f}" if "value" in row else f"  {row['work']}: {row['error']}")


def write(recording: Recording, place: Place, model: Path, args: argparse.Namespace) -> None:
    """The result and its table."""
    rows = summary.with_bounds(model, runs.read(args.runs))
    result = recording.result(
        limits=summary.limits(rows, args.threads),
        settings={"shape": args.shape, "threads": args.threads, "random_weights": True},
        metrics=summary.metrics(rows),
        definitions=DEFINITIONS,
        tables={"runs": rows, "engines": summary.versions(place, rows)},
        notes=runs.failures(rows),
    )
    results.save(result, args.out)
    text = markdown(result)
    args.out.with_suffix(".md").write_text(text)
    print(text)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
