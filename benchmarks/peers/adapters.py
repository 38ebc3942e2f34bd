"""Adapters of low rank on Quire and on other engines: one model, tokens per second with none, one and several.

    python -m benchmarks.peers.adapters                       installs engines first, where they are missing
    python -m benchmarks.peers.adapters --formats bf16 --peers quire,transformers --rounds 1
    python -m benchmarks.peers.adapters --report

Random weights in the shape of Qwen3-0.6B, adapters of rank 16 of all its linears; see run_adapters.py. Engines take
turns in processes of their own; each finished one adds rows to a file under --folder, and the same command continues
after an interruption. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.adapters import write_adapter
from benchmarks.peers import engines, runs
from benchmarks.peers.engines import ENGINES, PeerError, Place

from quire.bench.random_checkpoint import write_checkpoint
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.loader.safetensors import SafetensorsFile
from quire.planner.shapes import SHAPES
from quire.quant.floats import to_float32
from quire.util.platform import usable_cores

ROOT = Path(__file__).parents[2]
PEERS = ("quire", "llama.cpp", "transformers", "transformers, mixed", "vllm")
CASES = "1:0,1:1,8:0,8:8,32:0,32:8"
RANK, COUNT = 16, 8
# Names of the linears in GGUF files of this architecture.
GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=";".join(PEERS), help="names between semicolons")
    parser.add_argument("--formats", default="bf16,int4", help="names between commas")
    parser.add_argument("--cases", default=CASES, help="STREAMS:ADAPTERS between commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--report", action="store_true", help="print the table only")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    args = parser.parse_args()
    place = Place(args.folder.resolve())
    file = place.root / f"adapters-{args.shape}.jsonl"
    if not args.report:
        model = place.root / "models" / args.shape
        if not (model / "model.safetensors").exists():
            write_checkpoint(model, SHAPES[args.shape], merges=True)
        adapters = place.root / "models" / f"{args.shape}-adapters"
        for number in range(COUNT):
            if not (adapters / f"a{number}.gguf").exists():
                adapters.mkdir(exist_ok=True)
                if not (adapters / f"a{number}").exists():
                    write_adapter(adapters / f"a{number}", model, RANK, number)
                write_gguf_adapter(adapters / f"a{number}", adapters / f"a{number}.gguf")
        for number in range(args.rounds):
            for form in args.formats.split(","):
                for name in args.peers.split(";"):
                    measure(place, file, (model, adapters), name, form, number, args)
    print(table(runs.read(file)))


def write_gguf_adapter(folder: Path, to: Path) -> None:
    """The same adapter in llama.cpp's format, float32."""
    source = SafetensorsFile(folder / "adapter_model.safetensors")
    named: dict[str, str] = {}
    for name in source.names():
        layer, module, part = name.split(".")[4], name.split(".")[-3], name.split(".")[-2]
        named[f"blk.{layer}.{GGUF_NAMES[module]}.weight.lora_{part[-1].lower()}"] = name
    metadata: dict[str, Any] = {
        "general.architecture": "qwen3", "general.type": "adapter", "adapter.type": "lora",
        "adapter.lora.alpha": float(RANK),
    }  # fmt: skip
    outs = [OutTensor(name, "F32", source.info(of).shape) for name, of in named.items()]
    write_gguf(
        to, metadata, outs, lambda out: iter([to_float32(source.read(named[out.name]).copy(), "BF16")])
    )
    source.close()


def measure(
    place: Place, file: Path, files: tuple[Path, Path], name: str, form: str, number: int,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Run one engine with one of its formats, unless its rows are there."""
    engine = ENGINES[name.partition(",")[0]]
    own = next(iter(engine.formats.get(form, ())), None)
    key = {"round": number, "peer": name, "as": form}
    if own is None or any(all(row[k] == v for k, v in key.items()) for row in runs.read(file)):
        return
    model, adapters = files
    try:
        engine.install(place)
        if name.startswith("transformers"):
            engines.sh(engine.python(place), "-m", "pip", "install", "-q", "--no-deps", "peft", "psutil")
        said = engines.sh(
            engine.python(place), str(engines.HERE / "run_adapters.py"), name, "--model",
            str(engine.prepare(place, model, own) if name in ("llama.cpp", "vllm") else model),
            "--adapters", str(adapters), "--format", own, "--threads", str(args.threads),
            "--cases", args.cases, "--output", str(args.output),
            env={**os.environ, **engine.environment(place)},
        )  # fmt: skip
        rows = [json.loads(line) for line in said.splitlines() if line.startswith('{"engine"')]
    except (PeerError, subprocess.SubprocessError) as error:
        rows = [{"engine": name, "format": own, "error": str(error)}]
    runs.append(file, [{**key, **row} for row in rows])
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)


def table(rows: list[dict[str, object]]) -> str:
    """Medians as Markdown; the share is of the same engine without adapters at that number of streams."""
    found: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    for row in rows:
        if "error" not in row:
            case = int(str(row["streams"])), int(str(row["adapters"]))
            each = found.setdefault((str(row["as"]), str(row["peer"])), {})
            each.setdefault(case, []).append(float(str(row["rate"])))
    lines = ["| format | engine | streams | adapters | tok/s | share |", "|---|---|--:|--:|--:|--:|"]
    for (form, name), cases in found.items():
        for (streams, adapters), values in cases.items():
            rate, alone = statistics.median(values), statistics.median(cases.get((streams, 0), values))
            lines.append(f"| {form} | {name} | {streams} | {adapters} | {rate:.1f} | {rate / alone:.0%} |")
    failed = sorted({f"{row['peer']} {row['as']}: {row['error']}" for row in rows if "error" in row})
    return "\n".join([*lines, "", *failed])


if __name__ == "__main__":
    main()
