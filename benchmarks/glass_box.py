"""All figures of results/simulator.md, in parts of under six minutes each for a machine with nothing else to do.

    python -m benchmarks.glass_box                            # the parts, and the tables that each one fills
    python -m benchmarks.glass_box FOLDER --part chat         # appends to the files of the folder
    python -m benchmarks.glass_box FOLDER --report            # all tables of what is there, in Markdown

Parts whose name begins with 0.6b need the shape of Qwen3-0.6B with random weights, which the first of them writes into
the folder (1.2 GB). `--quick` takes a few seconds of each load, to try that a part works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from quire.bench.random_checkpoint import write_checkpoint
from quire.planner.shapes import SHAPES
from quire.records import dataclass

_LARGE = "0.6b"


@dataclass(frozen=True, slots=True)
class Part:
    """A program of `benchmarks` with its words, the file that it appends to, and the table that it fills."""

    program: str
    words: tuple[str, ...]
    file: str
    table: str
    quick: tuple[str, ...] = ()


_SECONDS, _FEW = ("--seconds", "8"), ("--seconds", "1.5")


def _trials(kind: str, model: str = "") -> Part:
    seconds = ("--seconds", "30") if model else _SECONDS
    words = ("--kinds", kind, *seconds)
    return Part(
        "simulated",
        words,
        f"trials{model}.jsonl",
        f"simulated and measured, {model[1:] or 'quire-mini'}",
        _FEW,
    )


def _applied(*changes: str) -> Part:
    return Part(
        "applied", (*_SECONDS, "--changes", *changes), "applied.jsonl", "what-ifs that were applied", _FEW
    )


PARTS = {
    "chat": _trials("chat"),
    "bursts": _trials("bursts"),
    "documents": _trials("documents"),
    "shared": _trials("shared prefix"),
    "0.6b-chat": _trials("chat", f"-{_LARGE}"),
    "0.6b-bursts": _trials("bursts", f"-{_LARGE}"),
    "0.6b-documents": _trials("documents", f"-{_LARGE}"),
    "0.6b-shared": _trials("shared prefix", f"-{_LARGE}"),
    "knee-chat": Part("simulated", ("--kinds", "chat", "bursts", "--knee"), "knees.jsonl", "the knee",
                      ("--requests", "30")),
    "knee-documents": Part("simulated", ("--kinds", "documents", "shared prefix", "--knee"), "knees.jsonl",
                           "the knee", ("--requests", "30")),
    "applied-limits": _applied("max_num_seqs halved", "max_num_seqs doubled", "token budget 128", "token budget 1024"),
    "applied-cache": _applied("prefix cache off", "int8 KV", "speculation on"),
    "applied-load": _applied("second replica", "policy sjf", "load × 1.5"),
    "speed": Part("simulation_speed", ("--requests", "20000"), "speed.md", "cost of a simulated step",
                  ("--requests", "800", "--rounds", "1")),
    "records": Part("recording", ("--steps", "3000"), "records.md", "cost of records", ("--steps", "100")),
}  # fmt: skip


def run(name: str, folder: Path, *, quick: bool) -> None:
    """Measure a part. Raises CalledProcessError."""
    part, file = PARTS[name], folder / PARTS[name].file
    words = [*part.words, *(part.quick if quick else ())]
    model = []
    if name.startswith(_LARGE):
        large = folder / _LARGE
        if not large.exists():
            write_checkpoint(large, SHAPES["qwen3-0.6b"])
        model = ["--", str(large), "--dtype", "bfloat16", "--max-model-len", "2048"]
    command = [sys.executable, "-m", f"benchmarks.{part.program}"]
    if file.suffix == ".md":
        with file.open("a") as out:
            subprocess.run([*command, *words], check=True, stdout=out)
    else:
        subprocess.run([*command, *words, str(file), *model], check=True)


def report(folder: Path) -> None:
    """Print the tables."""
    for file, part in {one.file: one for one in PARTS.values()}.items():
        if (folder / file).exists():
            print(f"\n**{part.table}**\n", flush=True)
            if file.endswith(".md"):
                print((folder / file).read_text())
            else:
                command = [sys.executable, "-m", f"benchmarks.{part.program}", str(folder / file), "--report"]
                subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    if asked.folder is None:
        for name, part in PARTS.items():
            print(f"{name:<16}{part.table:<44}benchmarks.{part.program} {' '.join(part.words)}")
        return
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.report:
        report(asked.folder)
    elif asked.part is not None:
        run(asked.part, asked.folder, quick=asked.quick)
    else:
        parser.error("--part or --report")


if __name__ == "__main__":
    main()
