"""The whole run: tokenizer, model, draft, adapters, evaluation, cards. Finished parts are skipped.

python -m tools.default_model.build build/default_model

It may be interrupted at any time; the same command continues from the last checkpoint. `--hours` is computing time for
everything, `--finish` ends the training of the model early. `--start` goes on from a finished model or a mean of
checkpoints, with its tokenizer, at a lower rate; give it another seed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .corpus.styles import STYLES
from .machine import description, stay_behind

PACKAGE = "tools.default_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The length of each part: options of the trainer, steps of an adapter, conversations, graded conversations."""

    mini: tuple[str, ...]
    draft: tuple[str, ...]
    adapter: int
    tokenizer: int
    items: int
    start: Path | None = None
    start_draft: Path | None = None


_SHIPPED = Path(__file__).parents[2] / "src/quire/models/quire-mini"
# The rate of a run that begins with trained weights, and the share of it in which the rate falls to nothing.
_LOWER_RATE = 0.003
_LONGER_COOLDOWN = 0.45
# Of what it began with in what ships: the loss is higher by a ninth, prompts written by hand are answered as well.
_BLEND = 0.35

# Takes minutes on one core and checks that every part works; the models are useless.
TRIAL = Budget(mini=("--steps", "20"), draft=("--steps", "20"), adapter=4, tokenizer=5_000, items=3)


def full(hours: float, *, finish: bool, start: Path | None, start_draft: Path | None) -> Budget:
    """Four fifths of the time for the model, an eighth for its draft, the rest for adapters and evaluation."""
    mini: tuple[str, ...] = ("--hours", f"{hours * 0.8:g}", *(("--finish",) if finish else ()))
    draft: tuple[str, ...] = ("--hours", f"{hours / 8:g}")
    if start:
        mini += (
            "--start",
            str(start),
            "--rate",
            str(_LOWER_RATE),
            "--cooldown",
            str(_LONGER_COOLDOWN),
            "--blend",
            str(_BLEND),
            "--prompts",
            "0",
            "--repeat-tokens",
            "128",
        )
    if start_draft:
        draft += ("--start", str(start_draft), "--rate", str(_LOWER_RATE))
    return Budget(
        mini=mini, draft=draft, adapter=300, tokenizer=40_000, items=80, start=start, start_draft=start_draft
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and the file that shows that it has finished."""

    done: Path
    command: tuple[str, ...]


def parts(out: Path, budget: Budget, seed: int, threads: int, machine: str) -> list[Part]:
    """The commands in order."""
    tokenizer, mini, draft = out / "tokenizer", out / "mini", out / "draft"
    if budget.start:  # weights alone are those of the model that ships, trained on
        tokenizer = budget.start if (budget.start / "tokenizer.json").exists() else _SHIPPED
    common = ("--tokenizer", str(tokenizer), "--seed", str(seed), "--threads", str(threads))
    train_mini = module("train", "mini", "--out", mini, *budget.mini, *common)
    train_draft = module(
        "train", "draft", "--out", draft, *budget.draft, "--teacher", mini / "model", *common
    )
    made = [
        Part(mini / "model" / "config.json", train_mini),
        Part(draft / "model" / "config.json", train_draft),
    ]
    if not budget.start:
        learn = module("tokenizer", tokenizer, "--seed", seed, "--conversations", budget.tokenizer)
        made.insert(0, Part(tokenizer / "tokenizer.json", learn))
    for style in STYLES:
        folder = out / "adapters" / style
        options = ("--base", mini / "model", "--out", folder, "--steps", budget.adapter, "--seed", seed)
        made.append(
            Part(folder / "style_rate.md", module("train_lora", style, *options, "--threads", threads))
        )
    for name, run, command in (("quire-mini", mini, train_mini), ("quire-mini-draft", draft, train_draft)):
        results = run / "results.md"
        evaluate = ("--items", budget.items, "--out", results, "--answers", run / "answers.jsonl")
        made.append(Part(results, module("evaluate", run / "model", *evaluate)))
        tables = [results]
        if run == mini:
            by_hand = run / "handwritten.md"
            sheet = ("--sheet", run / "sheet.txt", "--out", by_hand)
            made.append(Part(by_hand, module("handwritten", run / "model", *sheet)))
            tables.append(by_hand)
        card = ("--run", run, "--results", *tables, "--command", shlex.join(("python", *command[1:])))
        made.append(
            Part(run / "card.md", module("card", name, *card, "--machine", machine, "--out", run / "card.md"))
        )
    return made


def module(name: str, *arguments: object) -> tuple[str, ...]:
    """A command of this package."""
    return (sys.executable, "-m", f"{PACKAGE}.{name}", *map(str, arguments))


def run(steps: Sequence[Part]) -> None:
    """Run the unfinished parts. Raises CalledProcessError when one fails."""
    for part in steps:
        if part.done.exists():
            print("done:", part.done, flush=True)
            continue
        print("run:", shlex.join(part.command[1:]), flush=True)
        subprocess.run(part.command, check=True)


def collect(out: Path) -> Path:
    """Collect the shipped files in one folder: models with their cards and curves, adapters."""
    ship = out / "ship"
    for name, folder in (("quire-mini", "mini"), ("quire-mini-draft", "draft")):
        shutil.copytree(out / folder / "model", ship / name, dirs_exist_ok=True)
        shutil.copyfile(out / folder / "card.md", ship / name / "README.md")
        shutil.copyfile(out / folder / "loss.svg", ship / name / "loss.svg")
    rates = ["| adapter | style without it | style with it | questions |", "|---|---|---|---|"]
    for style in STYLES:
        source, target = out / "adapters" / style, ship / "quire-mini-adapters" / style
        target.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(source / file, target / file)
        rates.append((source / "style_rate.md").read_text().strip())
    (ship / "quire-mini-adapters" / "README.md").write_text(
        "\n".join(["# LoRA adapters of quire-mini", "", *rates]) + "\n"
    )
    return ship


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--hours", type=float, default=10.0, help="of computing, for everything")
    parser.add_argument(
        "--finish", action="store_true", help="cool the model down from its last checkpoint on, and go on"
    )
    parser.add_argument("--start", type=Path, help="model folder whose weights and tokenizer to go on with")
    parser.add_argument("--start-draft", type=Path, help="draft to go on with, of the same tokenizer")
    parser.add_argument("--machine", default=description(), help="for the cards")
    parser.add_argument(
        "--trial", action="store_true", help="takes minutes instead of hours; the models are useless"
    )
    args = parser.parse_args()
    stay_behind()
    if args.start_draft and not args.start:
        parser.error("--start-draft needs --start: a draft shares the tokenizer of its model")
    asked = full(args.hours, finish=args.finish, start=args.start, start_draft=args.start_draft)
    budget = TRIAL if args.trial else asked
    run(parts(args.out, budget, args.seed, args.threads, args.machine))
    ship = collect(args.out)
    size = sum(file.stat().st_size for file in ship.rglob("*") if file.is_file())
    print(f"{ship}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
