"""Run the same work on Quire and on other engines, in turns, and write one table.

    python -m benchmarks.peers                                    everything, for hours
    python -m benchmarks.peers --shape tiny --peers quire,transformers --rounds 1

Installs what is missing under build/peers first. Each round starts every engine anew, one after another, with the
machine's limits measured before each; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import workloads
from benchmarks.peers.engines import ENGINES, Engine, PeerError, Place, run_once
from benchmarks.peers.table import markdown

from quire.bench import results, shapes
from quire.bench.checkpoint import write_checkpoint
from quire.bench.limits import LimitsProbe
from quire.bench.recording import Recording
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
}


def main() -> int:
    args = arguments()
    place = Place(args.folder.resolve())
    recording = Recording("peers", ["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    model = checkpoint(place, args.shape)
    ready, notes = prepare(place, model, args)
    if args.prepare:
        print("\n".join(notes))
        return 0
    threads = args.threads or usable_cores()
    probe = LimitsProbe(threads=threads)
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for engine, form, files in ready:
            rows += measure(engine, place, (form, files), args.work, threads, number, probe, notes)
    result = recording.result(
        limits=probe.limits(),
        settings={"shape": args.shape, "rounds": args.rounds, "threads": threads, "random_weights": True},
        metrics=metrics(rows),
        definitions=DEFINITIONS,
        tables={"runs": rows, "engines": versions(place, ready)},
        notes=notes,
    )
    results.save(result, args.out)
    text = markdown(result)
    args.out.with_suffix(".md").write_text(text)
    print(text)
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
        "--work", type=_words, default=["decode", "prefill", "c8", "c32"], metavar="NAME,…", help=words
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--prepare", action="store_true", help="install engines and make model files, measure nothing"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "peers", help="environments and model files"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "peers" / "result.json")
    args = parser.parse_args()
    for name in args.peers:
        if name not in ENGINES:
            parser.error(f"--peers: {name!r} is not one of {', '.join(ENGINES)}")
    for work in args.work:
        if work not in {"decode", "prefill"}:
            try:
                workloads.requests_of(work)
            except ValueError as error:
                parser.error(f"--{error}")
    return args


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def checkpoint(place: Place, shape: str) -> Path:
    """The random-weight checkpoint that every engine's files are made of."""
    folder = place.root / "models" / shape
    if not (folder / "model.safetensors").exists():
        say(f"writing {shape} with random weights")
        write_checkpoint(folder, TINY if shape == "tiny" else shapes.config(shape), merges=True)
    return folder


def prepare(
    place: Place, model: Path, args: argparse.Namespace
) -> tuple[list[tuple[Engine, str, Path]], list[str]]:
    """Install and convert; what can be measured, and what cannot and why."""
    ready: list[tuple[Engine, str, Path]] = []
    notes: list[str] = []
    for name in args.peers:
        engine = ENGINES[name]
        try:
            say(f"{name}: environment")
            engine.install(place)
            for form in args.formats:
                if form in engine.formats:
                    say(f"{name}: {form}")
                    ready.append((engine, form, engine.prepare(place, model, engine.formats[form])))
        except PeerError as error:
            notes.append(f"{name}: left out: {error}")
            say(notes[-1])
    return ready, notes


def measure(
    engine: Engine, place: Place, files: tuple[str, Path], works: list[str], threads: int, number: int,
    probe: LimitsProbe, notes: list[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """One start of one engine: a row for each workload."""
    form, path = files
    say(f"round {number + 1}: {engine.name} {form}")
    limits = probe.sample()
    try:
        lines = run_once(engine, place, path, engine.formats[form], works, threads, seed=number)
    except PeerError as error:
        notes.append(f"{engine.name} {form}, round {number + 1}: {str(error).strip().splitlines()[-1]}")
        say(notes[-1])
        return []
    notes += [f"{engine.name} {form} {line['work']}: {line['error']}" for line in lines if "error" in line]
    return [
        {"round": number, "engine": engine.name, "format": form, "its_format": engine.formats[form],
         "work": line["work"], "value": line["value"], "bandwidth": limits.bandwidth}
        for line in lines if "value" in line
    ]  # fmt: skip


def metrics(rows: list[dict[str, Any]]) -> dict[str, results.Metric]:
    samples: dict[str, list[float]] = {}
    for row in rows:
        samples.setdefault(f"{row['engine']} {row['format']} {row['work']}", []).append(row["value"])
    return {
        name: results.metric(values, "MiB", "lower")
        if name.endswith(" memory")
        else results.metric(values, "tokens/s", "higher")
        for name, values in samples.items()
    }


def versions(place: Place, ready: list[tuple[Engine, str, Path]]) -> list[dict[str, Any]]:
    engines = {engine.name: engine for engine, _, _ in ready}
    return [
        {"engine": name, "version": engine.version(place), "packages": list(engine.packages)}
        for name, engine in engines.items()
    ]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
