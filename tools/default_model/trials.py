"""Trains every candidate shape for the same computing time and compares their held-out loss.

python -m tools.default_model.trials build/trials --minutes 20

Each has its own whole schedule. The unit is bits per byte of the answers, which vocabularies of different sizes share.
Finished candidates are kept, an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping
from pathlib import Path

from . import tokenizer as tokenizers
from .build import Part, module, run
from .evaluate import Loss, domain_losses
from .machine import description, stay_behind
from .plot import curves
from .shape import CANDIDATES, SHAPES


def parts(out: Path, names: list[str], minutes: float, options: tuple[str, ...]) -> list[Part]:
    """A tokenizer of every size, then a run of every shape."""
    sizes = sorted({SHAPES[name].vocab for name in names})
    folders = {vocab: out / f"tokenizer-{vocab}" for vocab in sizes}
    made = [Part(f / "tokenizer.json", module("tokenizer", f, "--vocab", v)) for v, f in folders.items()]
    length = ("--hours", f"{minutes / 60:g}", "--eval-minutes", f"{minutes / 12:g}")
    for name in names:
        files = ("--out", out / name, "--tokenizer", folders[SHAPES[name].vocab])
        command = module("train", name, *files, *length, *options)
        made.append(Part(out / name / "model" / "config.json", command))
    return made


def bits(loss: Loss) -> float:
    """Bits per byte."""
    return loss.nats / loss.bytes / math.log(2)


def total(losses: Mapping[str, Loss]) -> Loss:
    """All domains together."""
    return Loss(
        *(sum(getattr(loss, name) for loss in losses.values()) for name in ("nats", "tokens", "bytes"))
    )


def table(out: Path, measured: Mapping[str, Mapping[str, Loss]]) -> str:
    """One column for each candidate: size, speed, loss over all and by domain."""
    last = {}
    for name in measured:
        with (out / name / "loss.csv").open() as file:
            last[name] = list(csv.DictReader(file))[-1]
    rows: list[tuple[str, list[str]]] = [
        ("parameters", [f"{SHAPES[n].parameters / 1e6:.2f} M" for n in measured]),
        ("tokens", [f"{int(last[n]['tokens']) / 1e6:.2f} M" for n in measured]),
        ("tokens/s", [f"{int(last[n]['tokens']) / float(last[n]['seconds']):.0f}" for n in measured]),
        ("minutes", [f"{float(last[n]['seconds']) / 60:.1f}" for n in measured]),
        ("**all**", [f"**{bits(total(losses)):.4f}**" for losses in measured.values()]),
    ]
    rows += [
        (d, [f"{bits(losses[d]):.4f}" for losses in measured.values()]) for d in next(iter(measured.values()))
    ]
    lines = ["| | " + " | ".join(measured) + " |", "|---" * (len(measured) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def plot(out: Path, measured: Mapping[str, Mapping[str, Loss]]) -> None:
    """Held-out loss over computing time."""
    series = {}
    for name, losses in measured.items():
        loss = total(losses)
        per_byte = loss.tokens / loss.bytes / math.log(2)
        with (out / name / "loss.csv").open() as file:
            rows = [r for r in csv.DictReader(file) if r["eval_loss"]]
        series[name] = [(float(r["seconds"]) / 60, float(r["eval_loss"]) * per_byte) for r in rows]
    curves(out / "trials.svg", "held-out loss, bits per byte", series, "bit", "minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0, help="of computing for each candidate")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(CANDIDATES))
    parser.add_argument("--items", type=int, default=24, help="held-out conversations of every domain")
    parser.add_argument("--threads", type=int, default=0)
    args, options = parser.parse_known_args()
    stay_behind()
    run(parts(args.out, args.shapes, args.minutes, ("--threads", str(args.threads), *options)))
    measured = {}
    for name in args.shapes:
        folder = args.out / name / "model"
        measured[name] = domain_losses(folder, tokenizers.load(folder), args.items)
    text = (
        f"{args.minutes:g} minutes of computing each, {description()}. Bits per byte of held-out answers.\n\n"
    )
    text += table(args.out, measured)
    (args.out / "trials.md").write_text(text)
    plot(args.out, measured)
    print(text)


if __name__ == "__main__":
    main()
