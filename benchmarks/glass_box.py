"""All figures of results/simulator.md, in parts of under six minutes each for a machine with nothing else to do.

    python -m benchmarks.glass_box                            # the parts, and the tables that each one fills
    python -m benchmarks.glass_box FOLDER --part chat         # adds to what is in the folder
    python -m benchmarks.glass_box FOLDER --report            # all tables of what is there, in Markdown

Parts whose name begins with 0.6b need the shape of Qwen3-0.6B with random weights, which `--part 0.6b` writes into the
folder (1.2 GB); they serve it in int8. `--quick` takes a few seconds of each load, to try that a part works. Logs stay
in the folder, and the report simulates them: that takes minutes, and may be done on a machine with other work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from quire.bench.random_checkpoint import write_checkpoint
from quire.planner.shapes import SHAPES
from quire.records import dataclass

LARGE = "0.6b"
_SERVED = ("--quantization", "int8", "--max-model-len", "2048")


@dataclass(frozen=True, slots=True)
class Part:
    """A program of `benchmarks` with its words, the file or folder that it adds to, and the table that it fills. With
    the words `quick` it is short; `report` are those of its tables."""

    program: str
    words: tuple[str, ...]
    into: str
    table: str
    quick: tuple[str, ...] = ()
    report: tuple[str, ...] = ()


def _trials(kind: str, seconds: int, model: str = "quire-mini") -> Part:
    words = ("--kinds", kind, "--seconds", str(seconds))
    quick = ("--seconds", "1.5", "--shares", "0.2", "0.4")
    return _served(words, model, quick)


def _knee(*kinds: str, requests: int, model: str = "quire-mini") -> Part:
    return _served(("--kinds", *kinds, "--knee", "--requests", str(requests)), model, ("--requests", "20"))


def _served(words: tuple[str, ...], model: str, quick: tuple[str, ...]) -> Part:
    slow = ("--goodput", "ttft:2000", "tpot:100") if model != "quire-mini" else ()
    return Part("simulated", words, f"logs of {model}", f"simulated and measured, {model}", quick, slow)


def _applied(*changes: str) -> Part:
    words, quick = ("--changes", *changes, "--seconds", "15"), ("--seconds", "1.5")
    return Part("applied", words, "applied", "what-ifs that were applied", quick)


PARTS = {
    "chat": _trials("chat", 40),
    "bursts": _trials("bursts", 40),
    "documents": _trials("documents", 60),
    "shared": _trials("shared prefix", 60),
    "knee-chat": _knee("chat", "bursts", requests=400),
    "knee-documents": _knee("documents", "shared prefix", requests=120),
    LARGE: Part("", (), LARGE, "weights of the larger shape"),
    "0.6b-chat": _trials("chat", 60, LARGE),
    "0.6b-bursts": _trials("bursts", 60, LARGE),
    "0.6b-documents": _trials("short documents", 70, LARGE),
    "0.6b-shared": _trials("short shared prefix", 60, LARGE),
    "0.6b-knee": _knee("chat", requests=60, model=LARGE),
    "applied-limits": _applied("max_num_seqs halved", "max_num_seqs doubled", "token budget 128", "token budget 1024"),
    "applied-cache": _applied("prefix cache off", "int8 KV", "speculation on"),
    "applied-load": _applied("second replica", "policy sjf", "load × 1.5", "tuned"),
    "speed": Part("simulation_speed", ("--requests", "40000"), "speed.md", "cost of a simulated step",
                  ("--requests", "800", "--rounds", "1")),
    "stages": Part("stage_times", (), "stages.md", "cost of timing every op", ("--rounds", "1", "--output", "8")),
    "records": Part("recording", ("--steps", "3000"), "records.md", "cost of records", ("--steps", "100")),
}  # fmt: skip


def run(name: str, folder: Path, *, quick: bool) -> None:
    """Measure a part. Raises CalledProcessError."""
    part, large = PARTS[name], folder / LARGE
    into, words = folder / part.into, [*part.words, *(part.quick if quick else ())]
    if name == LARGE:
        write_checkpoint(large, SHAPES["qwen3-0.6b"])
        return
    command = [sys.executable, "-m", f"benchmarks.{part.program}"]
    if into.suffix == ".md":
        with into.open("a") as out:
            subprocess.run([*command, *words], check=True, stdout=out)
    else:
        model = ["--serve", str(large), *_SERVED] if name.startswith(LARGE) else []
        subprocess.run([*command, str(into), *words, *model], check=True)


def report(folder: Path) -> None:
    """Print the tables."""
    for part in {one.into: one for name, one in PARTS.items() if name != LARGE}.values():
        into = folder / part.into
        if into.exists():
            print(f"\n**{part.table}**\n", flush=True)
            if into.suffix == ".md":
                print(into.read_text())
            else:
                command = [
                    sys.executable,
                    "-m",
                    f"benchmarks.{part.program}",
                    str(into),
                    "--report",
                    *part.report,
                ]
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
            program = f"benchmarks.{part.program} {' '.join(part.words)}" if part.program else ""
            print(f"{name:<16}{part.table:<44}{program}")
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
