"""Speculative decoding on Quire and on other engines: one target and one draft, tokens per second and speed-up.

    python -m benchmarks.peers.speculation                       installs engines first, where they are missing
    python -m benchmarks.peers.speculation --formats bf16 --peers quire,transformers --rounds 1
    python -m benchmarks.peers.speculation --report

Target and draft are those of draft_pair.py, in the shape of Qwen3-0.6B; 128 tokens in, 128 out, one stream, greedy.
Engines take turns in processes of their own; each finished one adds rows to a file under --folder, and the same command
continues after an interruption. Figures are medians over the rounds. vLLM's wheel drafts with n-grams.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import engines, runs
from benchmarks.peers.draft_pair import write_pair
from benchmarks.peers.engines import ENGINES, PeerError, Place

from quire.planner.shapes import SHAPES
from quire.util.platform import usable_cores

ROOT = Path(__file__).parents[2]
SHARE = 0.02  # of the upper layers; see draft_pair
PEERS = ("quire", "llama.cpp", "transformers", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="names between commas")
    parser.add_argument("--formats", default="bf16,int8,int4", help="names between commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="of each engine in a round")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--share", type=float, default=SHARE, help="of the layers that the draft has not")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--report", action="store_true", help="print the table only")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    args = parser.parse_args()
    place = Place(args.folder.resolve())
    file = place.root / f"speculation-{args.share:g}.jsonl"
    if not args.report:
        models = place.root / "models" / f"pair-{args.share:g}"
        pair = write_pair(models, SHAPES["qwen3-0.6b"], args.share)
        for number in range(args.rounds):
            for form in args.formats.split(","):
                for name in args.peers.split(","):
                    measure(place, file, pair, name, form, number, args)
    print(table(runs.read(file)))


def measure(
    place: Place,
    file: Path,
    pair: tuple[Path, Path],
    name: str,
    form: str,
    number: int,
    asked: argparse.Namespace,
) -> None:
    """Run one engine with one of its formats, unless its rows are there."""
    engine = ENGINES[name]
    own = next(iter(engine.formats.get(form, ())), None)
    key = {"round": number, "peer": name, "as": form}
    if own is None or any(all(row[k] == v for k, v in key.items()) for row in runs.read(file)):
        return
    try:
        engine.install(place)
        target, draft = (
            engine.prepare(place, model, own) if name == "llama.cpp" else model for model in pair
        )
        said = engines.sh(
            engine.python(place), str(engines.HERE / "run_speculation.py"), name, "--target", str(target), "--draft",
            str(draft), "--format", own, "--threads", str(asked.threads), "--runs", str(asked.runs),
            "--output", str(asked.output),
            env={**os.environ, **engine.environment(place)},
        )  # fmt: skip
        rows = [json.loads(line) for line in said.splitlines() if line.startswith('{"engine"')]
    except (PeerError, subprocess.SubprocessError) as error:
        rows = [{"engine": name, "format": own, "drafts": "off", "error": str(error)}]
    runs.append(file, [{**key, **row} for row in rows])
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)


def table(rows: list[dict[str, object]]) -> str:
    """Medians, and the better one of both numbers of drafts, as Markdown; n-grams have rows of their own."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    lines = [
        "| format | engine | off tok/s | with drafts tok/s | drafts | speed-up |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "error" not in row:
            each = found.setdefault((str(row["as"]), str(row["peer"])), {})
            each.setdefault(str(row["drafts"]), []).append(float(str(row["rate"])))
    for (form, name), rates in list(found.items()):
        if looked_up := rates.pop("ngram", None):
            found[form, f"{name}, n-grams"] = {"off": [*rates["off"]], "default": looked_up}
    for (form, name), rates in sorted(found.items()):
        off = statistics.median(rates.pop("off"))
        drafts, best = max(((k, statistics.median(v)) for k, v in rates.items()), key=lambda pair: pair[1])
        lines.append(f"| {form} | {name} | {off:.1f} | {best:.1f} | {drafts} | {best / off:.2f} |")
    failed = sorted({f"{row['peer']} {row['as']}: {row['error']}" for row in rows if "error" in row})
    return "\n".join([*lines, "", *failed])


if __name__ == "__main__":
    main()
