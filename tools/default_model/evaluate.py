"""Grades a model folder on held-out conversations; prints tables in Markdown.

python -m tools.default_model.evaluate DIR --backend torch --items 100 --out results.md
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from . import tokenizer as tokenizers
from .backends import BACKENDS, Generate
from .corpus.conversation import Check, Conversation
from .corpus.draw import Split
from .corpus.mixture import DOMAINS, GENERATOR_VERSION, of_domain
from .grading import Grade, grade
from .rendering import END_OF_TEXT, IM_END, answer, prompt, segments

EVAL_SEED = 1000
MAX_TOKENS = 320


@dataclass(frozen=True, slots=True)
class Item:
    """One graded answer: the prompt, the check of the answer, and the answer of the generator."""

    domain: str
    prompt: str
    check: Check
    expected: str

    @property
    def task(self) -> str:
        task = str(self.check.data["task"])
        return f"{task}, {self.check.data['digits']} digits" if "digits" in self.check.data else task


@dataclass(frozen=True, slots=True)
class Graded:
    """An item with the answer of the model."""

    item: Item
    said: str
    grade: Grade


def items_of(conversations: Sequence[Conversation]) -> list[Item]:
    """Every turn with a check, each after the true turns before it."""
    return [
        Item(made.domain, prompt(made, i), turn.check, answer(turn))
        for made in conversations
        for i, turn in enumerate(made.turns)
        if turn.check is not None
    ]


def collect(per_domain: int, seed: int = EVAL_SEED) -> list[Item]:
    """The evaluation set: items of `per_domain` held-out conversations of every domain."""
    return [
        item for domain in DOMAINS for item in items_of(of_domain(domain, seed, Split.EVAL, per_domain))
    ]  # fmt: skip


def run(
    items: Sequence[Item], generate: Generate, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS
) -> list[Graded]:
    """Generate greedily and grade."""
    prompts = [tokenizer.encode(item.prompt).ids for item in items]
    said = [tokenizer.decode(ids, skip_special_tokens=False) for ids in generate(prompts, max_tokens)]
    return [Graded(item, text, grade(item.check, text)) for item, text in zip(items, said, strict=True)]


def tables(graded: Sequence[Graded]) -> str:
    """Rates by domain, by task, and of the parts of JSON answers and tool calls."""
    by_domain: dict[str, list[bool]] = defaultdict(list)
    by_task: dict[tuple[str, str], list[bool]] = defaultdict(list)
    marks: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for g in graded:
        by_domain[g.item.domain].append(g.grade.right)
        by_task[g.item.domain, g.item.task].append(g.grade.right)
        for name, value in g.grade.marks.items():
            marks[g.item.domain, name].append(value)
    lines = ["| domain | right | of |", "|---|---|---|"]
    lines += [f"| {d} | {_percent(v)} | {len(v)} |" for d, v in sorted(by_domain.items())]
    lines += ["", "| domain | task | right | of |", "|---|---|---|---|"]
    lines += [f"| {d} | {t} | {_percent(v)} | {len(v)} |" for (d, t), v in sorted(by_task.items())]
    lines += ["", "| domain | part of the answer | share | of |", "|---|---|---|---|"]
    lines += [f"| {d} | {m} | {_percent(v)} | {len(v)} |" for (d, m), v in sorted(marks.items())]
    return "\n".join(lines) + "\n"


def _percent(values: Sequence[bool]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


@dataclass(frozen=True, slots=True)
class Loss:
    """Cross-entropy of answers: the sum in nats over their tokens, and their length in UTF-8."""

    nats: float
    tokens: int
    bytes: int


def domain_losses(
    folder: Path, tokenizer: Tokenizer, per_domain: int, seed: int = EVAL_SEED
) -> dict[str, Loss]:
    """The loss on the generator's held-out answers of every domain, under the torch code."""
    import torch
    from torch.nn import functional as F

    from . import hf_folder
    from .batching import Batches, BatchPlan

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hf_folder.load(folder, device)
    losses = {}
    for domain in DOMAINS:
        held_out = of_domain(domain, seed, Split.EVAL, per_domain)
        plan = BatchPlan(seed=0, pool=per_domain, steps_per_pool=1)
        nats, tokens = 0.0, 0
        for batch in (b.to(device) for b in Batches(held_out.__getitem__, tokenizer, plan).step(0)):
            with torch.no_grad():
                logits = model.logits(model(batch.ids, batch.groups, batch.rows))
            nats += float(F.cross_entropy(logits, batch.targets, reduction="sum"))
            tokens += len(batch.rows)
        size = sum(len(s.text.encode()) for made in held_out for s in segments(made) if s.learn)
        losses[domain] = Loss(nats, tokens, size)
    return losses


def perplexity_table(losses: Mapping[str, Loss]) -> str:
    """Perplexity of the answers by domain."""
    lines = ["| domain | perplexity | tokens |", "|---|---|---|"]
    lines += [
        f"| {d} | {math.exp(loss.nats / loss.tokens):.3f} | {loss.tokens} |" for d, loss in losses.items()
    ]
    return "\n".join(lines) + "\n"


def stop_ids(tokenizer: Tokenizer) -> set[int]:
    """The ids that end an answer."""
    return {tokenizers.id_of(tokenizer, IM_END), tokenizers.id_of(tokenizer, END_OF_TEXT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="torch")
    parser.add_argument("--items", type=int, default=100, help="conversations of every domain")
    parser.add_argument("--seed", type=int, default=EVAL_SEED)
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    parser.add_argument("--answers", type=Path, help="JSON lines file for every answer")
    args = parser.parse_args()
    tokenizer = tokenizers.load(args.folder)
    generate = BACKENDS[args.backend](args.folder, stop_ids(tokenizer))
    graded = run(collect(args.items, args.seed), generate, tokenizer)
    how = f"backend {args.backend}, generator {GENERATOR_VERSION}, seed {args.seed}, held-out split"
    head = f"Greedy, float32, {how}.\n\n"
    losses = domain_losses(args.folder, tokenizer, args.items, args.seed)
    text = head + tables(graded) + "\n" + perplexity_table(losses)
    print(text)
    if args.out:
        args.out.write_text(text)
    if args.answers:
        with args.answers.open("w") as file:
            for g in graded:
                record = {
                    "domain": g.item.domain, "task": g.item.task, "right": g.grade.right, "prompt": g.item.prompt,
                    "expected": g.item.expected, "said": g.said,
                }  # fmt: skip
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
