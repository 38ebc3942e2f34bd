"""lm-evaluation-harness: `local-completions` gives transformers' loglikelihoods within 1e-3, on a task made here.

The task is multiple choice over random texts, read from a local file; nothing is downloaded. Also what generation
tasks ask for: greedy text until a stop string, equal to transformers'.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

LIMIT = 1e-3
CHOICES = """
task: quire_choices
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
TEXTS = """
task: quire_texts
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e", "zz"], max_gen_toks: 24, temperature: 0.0, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def main() -> None:
    url, folder = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as name:
        tasks = write_tasks(Path(name))
        api = f"model=tiny,base_url={url}/v1/completions,max_length=1024"
        api += f",tokenizer={folder},tokenizer_backend=huggingface"
        whole = evaluate(tasks, "local-completions", f"{api},num_concurrent=4", 8)
        alone = evaluate(tasks, "local-completions", f"{api},num_concurrent=1,tokenized_requests=False", 1)
        reference = evaluate(tasks, "hf", f"pretrained={folder},dtype=float32", 8)
    compare(whole, reference)
    compare(alone, reference)
    print("lm_eval", version("lm_eval"), "transformers", version("transformers"))


def write_tasks(folder: Path) -> TaskManager:
    chooser = random.Random(0)

    def text(length: int) -> str:
        return "".join(chooser.choice("abcdefgh .,") for _ in range(length)).strip() or "a"

    lines = [
        {"question": text(chooser.randrange(5, 200)), "choices": [text(chooser.randrange(1, 30)) for _ in range(4)],
         "answer": chooser.randrange(4)}
        for _ in range(20)
    ]  # fmt: skip
    file = folder / "lines.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "choices.yaml").write_text(CHOICES.format(file=file))
    (folder / "texts.yaml").write_text(TEXTS.format(file=file))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(tasks: TaskManager, model: str, arguments: str, batch: int) -> dict[str, list[Any]]:
    """What the model answered to every document of both tasks, in order."""
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["quire_choices", "quire_texts"], task_manager=tasks,
        batch_size=batch, device="cpu", bootstrap_iters=0, log_samples=True,
    )  # fmt: skip
    return {
        task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }


def compare(ours: dict[str, list[Any]], reference: dict[str, list[Any]]) -> None:
    pairs = [
        (mine, theirs)
        for a, b in zip(ours["quire_choices"], reference["quire_choices"], strict=True)
        for mine, theirs in zip(a, b, strict=True)
    ]
    worst = max(abs(mine[0] - theirs[0]) for mine, theirs in pairs)
    print(f"{len(pairs)} loglikelihoods: largest difference {worst:.2e}")
    assert worst < LIMIT
    assert [mine[1] for mine, _ in pairs] == [
        theirs[1] for _, theirs in pairs
    ]  # is it the greedy continuation
    texts = list(zip(ours["quire_texts"], reference["quire_texts"], strict=True))
    same = sum(mine == theirs for mine, theirs in texts)
    print(f"{same} of {len(texts)} greedy texts equal")
    assert same == len(texts)


if __name__ == "__main__":
    main()
