"""Text that a model writes itself, with the control tokens of its chats: what `quire train-draft` trains a draft on.

python -m tools.default_model.said DIR --conversations 3000 --out said.txt

Every answer of the generator's training conversations is written anew by the model, greedily, after the true turns
before it. The prompts of one split never hold a combination of the other, so `--split eval` asks what is new to both.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from quire import LLM, SamplingParams

from .corpus.draw import Split
from .corpus.mixture import stream
from .rendering import END_OF_TEXT, IM_END, prompt

SEED = 2000  # other conversations than those of a training run
MAX_TOKENS = 256
ROWS = 32  # asked at once: more would not be faster


def prompts(split: Split, conversations: int, seed: int = SEED) -> list[str]:
    """The text before the last answer of each conversation; plain documents have none and are left out."""
    return [
        prompt(made, len(made.turns) - 1)
        for made in islice(stream(seed, split), conversations)
        if made.turns and made.turns[-1].role == "assistant"
    ]


def answered(folder: Path, asked: list[str], threads: int | None) -> Iterator[str]:
    """Each prompt with what the model says to it, in order."""
    with LLM(folder, max_num_seqs=ROWS, threads=threads, progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, skip_special_tokens=False)
        for text, output in zip(asked, llm.generate(asked, params), strict=True):
            yield text + output.outputs[0].text + IM_END + END_OF_TEXT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--split", type=Split, default=Split.TRAIN, choices=list(Split))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asked = prompts(args.split, args.conversations, args.seed)
    args.out.write_text("".join(answered(args.folder, asked, args.threads)), encoding="utf-8")


if __name__ == "__main__":
    main()
