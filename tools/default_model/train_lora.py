"""Trains one adapter for a style and says how often held-out answers have that style.

python -m tools.default_model.train_lora pirate --base DIR --out DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from . import hf_folder, lora
from . import tokenizer as tokenizers
from .batching import Batches, BatchPlan
from .corpus.draw import Split
from .corpus.styles import STYLES, styled
from .evaluate import stop_ids
from .generation import greedy
from .machine import autocast, keep_memory, precision, stay_behind
from .optimizer import Optimizer, Schedule
from .rendering import prompt

BASE_NAME = "quire-mini"


def train(style: str, base: Path, out: Path, *, steps: int, seed: int, rate: float) -> list[float]:
    """Train and write the adapter folder; returns the loss of every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = tokenizers.load(base)
    model = hf_folder.load(base)
    lora.attach(model, torch.Generator().manual_seed(seed))
    model.to(device).train()
    optimizer = Optimizer(model, muon=False, weight_decay=0.01)
    schedule = Schedule(peak=rate, warmup=max(1, steps // 20), start=steps // 3, cooldown=steps - steps // 3)
    kind = precision(device)
    plan = BatchPlan(seed=seed, pool=128, steps_per_pool=4)
    batches = Batches(lambda i: styled(style, seed, Split.TRAIN, i), tokenizer, plan)
    losses = []
    for step in range(steps):
        parts = [b.to(device) for b in batches.step(step)]
        rows, total = sum(len(b.rows) for b in parts), 0.0
        for batch in parts:
            with autocast(device, kind):
                logits = model.logits(model(batch.ids, batch.groups, batch.rows)).float()
            loss = F.cross_entropy(logits, batch.targets, reduction="sum") / rows
            loss.backward()
            total += loss.item()
        optimizer.step(schedule.rate(step))
        losses.append(total)
        if (step + 1) % 50 == 0:
            print(f"{style} step {step + 1} loss {total:.3f}", flush=True)
    lora.save(model, out, BASE_NAME)
    return losses


def style_rate(style: str, base: Path, adapter: Path | None, count: int) -> float:
    """The share of first answers to held-out questions that have the style."""
    tokenizer = tokenizers.load(base)
    model = hf_folder.load(base)
    if adapter is not None:
        lora.merge(model, adapter)
    made = [styled(style, 77, Split.EVAL, i) for i in range(count)]
    prompts = [tokenizer.encode(prompt(c, 1)).ids for c in made]
    said = [tokenizer.decode(ids) for ids in greedy(model, prompts, stop_ids(tokenizer), 160)]
    return _share([STYLES[style].shown(text) for text in said])


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("style", choices=sorted(STYLES))
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--items", type=int, default=100, help="held-out questions to grade")
    args = parser.parse_args()
    stay_behind()
    keep_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    train(args.style, args.base, args.out, steps=args.steps, seed=args.seed, rate=args.rate)
    before = style_rate(args.style, args.base, None, args.items)
    after = style_rate(args.style, args.base, args.out, args.items)
    line = f"| {args.style} | {100 * before:.1f} % | {100 * after:.1f} % | {args.items} |"
    (args.out / "style_rate.md").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
