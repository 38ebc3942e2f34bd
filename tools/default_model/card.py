"""Writes the model card of a finished run: the model, its training, its abilities and limits."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from .corpus.draw import HELD_OUT_ONE_IN
from .corpus.mixture import DOMAINS, GENERATOR_VERSION
from .shape import shape_from_config

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {name}

A chat model of {millions:.2f} million parameters that ships with Quire, so that the system can be tried and tested
without a network. It was trained from nothing on text that a program in this repository generates
(`tools/default_model`), and on nothing else.

## Honest limits

- It knows almost nothing about the world. Asked for such a fact it should say that it does not know; at times it
  makes something up.
- It understands the kinds of requests listed below, in wordings near those of the generator, in English. Free
  conversation, code, long documents and other languages are beyond it.
- Arithmetic holds for the sizes in the table and fails beyond them. Stories follow a grammar of {plots} plots.
- The tables say how often each kind of task fails.
- It has no safety training: there is nothing harmful in its training text and no refusal either.

Its use is to test serving software. Do not use it for anything that matters.

## Shape

{shape}

## Training

| | |
|---|---|
| generator | version {version}, seed {seed}, domains {domains} |
| held out | one combination in {one_in} (operands, names, schemas, wordings), never in training |
| tokens | {tokens:,} in {steps:,} steps, final loss {loss} (training), {held} (held-out), nats per answer token |
| time | {hours:.2f} hours of computing at {speed:,.0f} tokens/s: {machine} |
| rate | at its peak for {peak:,} steps, then down to nothing |
| options | `{options}` |
| command | `{command}` |

Loss on the answers, on plain documents, and in a share `prompts` of the conversations on what the user says. Weights
are bfloat16.

![loss curve](loss.svg)

## Evaluation

{results}
"""


def card(name: str, run: Path, results: str, command: str, machine: str) -> str:
    """The card as Markdown, from the files of a training run and the tables of an evaluation."""
    from .corpus.story_plots import PLOTS

    options = json.loads((run / "run.json").read_text())
    config = json.loads((run / "model" / "config.json").read_text())
    shape = shape_from_config(config)
    with (run / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    seconds = float(rows[-1]["seconds"])
    facts = (
        f"Qwen3 architecture: {shape.layers} layers, hidden size {shape.hidden}, {shape.heads} query and "
        f"{shape.kv_heads} key/value heads of {shape.head_dim}, MLP {shape.intermediate}, vocabulary {shape.vocab} "
        f"(byte-level BPE, words as Qwen2 cuts them, digits alone), tied embeddings, context {shape.max_positions}."
    )
    return _CARD.format(
        name=name,
        millions=shape.parameters / 1e6,
        plots=len(PLOTS),
        shape=facts,
        version=GENERATOR_VERSION,
        seed=options["seed"],
        domains=", ".join(DOMAINS),
        one_in=HELD_OUT_ONE_IN,
        tokens=int(rows[-1]["tokens"]),
        steps=len(rows),
        loss=rows[-1]["loss"],
        held=rows[-1]["eval_loss"],
        hours=seconds / 3600,
        speed=int(rows[-1]["tokens"]) / seconds,
        peak=json.loads((run / "cooldown.json").read_text())["start"],
        machine=machine,
        options=" ".join(f"{k}={v}" for k, v in options.items()),
        command=command,
        results=results,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--run", type=Path, required=True, help="output folder of the trainer")
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="tables of the evaluation")
    parser.add_argument("--command", required=True, help="how the run was started")
    parser.add_argument("--machine", required=True, help="description of the machine")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = "\n".join(path.read_text() for path in args.results)
    args.out.write_text(card(args.name, args.run, results, args.command, args.machine))


if __name__ == "__main__":
    main()
