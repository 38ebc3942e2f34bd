"""Easy requests to a small model: what it costs at equal quality, beside sending as many at random.

    python -m benchmarks.difficulty labels FOLDER
    python -m benchmarks.difficulty report FOLDER

Small is quire-mini-draft, large is quire-mini. `labels` lets both answer
held-out conversations of the generator that they were trained with, greedily, and grades the answers with its checks:
the lines of `train.jsonl` and `test.jsonl` are of other draws, and what has the same features in both is no test.
`report` trains on the first file, as `quire train-router` does, and tells of the second one. A request costs the
parameters that it runs through. The second pair is quire-mini beside one that is always right, at a tenth of the cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tools.default_model import tokenizer as tokenizers
from tools.default_model.backends import BACKENDS
from tools.default_model.corpus.conversation import Conversation
from tools.default_model.corpus.draw import Split
from tools.default_model.corpus.mixture import DOMAINS, of_domain
from tools.default_model.evaluate import Item, run, stop_ids
from tools.default_model.rendering import prompt

import quire
from quire.offline.difficulty_training import LabelledRequests, RoutingTable, read_labels, train_difficulty

SETS = {"train": (2001, 200), "test": (2002, 60)}  # seed, and conversations of every domain
MODELS = {"small": "quire-mini-draft", "large": "quire-mini"}


def asks(per_domain: int, seed: int) -> list[tuple[dict[str, Any], Item]]:
    """Bodies of chats, each with its text, its domain and the check of its answer."""
    return [
        ask for domain in DOMAINS for made in of_domain(domain, seed, Split.EVAL, per_domain) for ask in _turns(made)
    ]  # fmt: skip


def _turns(made: Conversation) -> list[tuple[dict[str, Any], Item]]:
    """The turns of a conversation that have a check, each after the true turns before it."""
    messages, found = made.messages(), []
    for number, turn in enumerate(made.turns):
        if turn.check is not None:
            body = {"messages": messages[:number]} | ({"tools": made.tools} if made.tools else {})
            found.append((body, Item(made.domain, prompt(made, number), turn.check, "")))
    return found


def rights(model: str, items: Sequence[Item]) -> list[bool]:
    """Which answers of a model are right."""
    folder = Path(quire.__file__).parent / "models" / model
    tokenizer = tokenizers.load(folder)
    generate = BACKENDS["quire"](folder, stop_ids(tokenizer))
    return [each.grade.right for each in run(items, generate, tokenizer)]


def small_cost() -> float:
    """What a token costs at the small model, where it costs 1 at the large one: by bytes of weights."""
    folder = Path(quire.__file__).parent / "models"
    small, large = (
        (folder / MODELS[size] / "model.safetensors").stat().st_size for size in ("small", "large")
    )
    return small / large


def cases(folder: Path, name: str) -> dict[str, tuple[LabelledRequests, float]]:
    """Labels of a file by pair of models, with what a request costs at the small one."""
    both = read_labels(folder / f"{name}.jsonl")
    if name == "test":
        asked = {frozenset(each.items()) for each in read_labels(folder / "train.jsonl").features}
        new = [row for row, each in enumerate(both.features) if frozenset(each.items()) not in asked]
        both = LabelledRequests([both.features[row] for row in new], both.small[new], both.large[new])
    always = LabelledRequests(both.features, both.large, np.ones_like(both.large))
    return {"draft, mini": (both, small_cost()), "mini, one that is always right": (always, 0.1)}


def saved(table: RoutingTable, threshold: float) -> tuple[float, float, float, float]:
    """Share to small, part of large's quality, cost, and the cost at random with that quality."""
    share, quality = table.at(threshold)
    chance = table.random_share(quality)
    return share, quality / table.large, table.cost(share), table.cost(chance or 0.0)


def report(folder: Path) -> None:
    """Train on one file, tell of the other."""
    draw = np.random.default_rng(0)
    for name, (labels, cost) in cases(folder, "train").items():
        tests = cases(folder, "test")[name][0]
        print(f"\n{name}: {len(labels.features)} lines to train, {len(tests.features)} to test")
        print("| wanted | to small | quality kept | cost | at random | saved: 95 % interval |")
        print("|--:|--:|--:|--:|--:|---|")
        model, own_table = train_difficulty(labels, lambda _: 0.5, cost)
        judged = np.array([model.suffices(each) for each in tests.features])
        table = RoutingTable(judged, tests, cost)
        for part in (0.9, 0.95, 0.98, 0.99):
            threshold = own_table.for_quality(part)
            gains = list[float]()
            for _ in range(1000):
                rows = draw.integers(0, len(judged), len(judged))
                some = LabelledRequests([], tests.small[rows], tests.large[rows])
                _, _, own, chance = saved(RoutingTable(judged[rows], some, cost), threshold)
                gains.append(chance - own)
            share, kept, own, chance = saved(table, threshold)
            low, high = np.quantile(gains, (0.025, 0.975))
            print(
                f"| {part} | {share:.0%} | {kept:.3f} | {own:.3f} | {chance:.3f} | {chance - own:.3f}: {low:.3f} to "
                f"{high:.3f} |"
            )
        print(
            f"calibration error {table.calibration_error:.3f}; small right {table.small:.3f}, large {table.large:.3f}"
        )
        print("\n".join(f"| {said:.3f} | {was:.3f} | {count} |" for said, was, count in table.bins()))


def main() -> None:
    """Make labels, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("labels", "report"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "report":
        report(given.folder)
        return
    for name, (seed, per_domain) in SETS.items():
        if (given.folder / f"{name}.jsonl").exists():
            continue
        wanted = asks(per_domain, seed)
        right = {}
        for size, model in MODELS.items():
            right[size] = rights(model, [item for _, item in wanted])
            print(f"{name}: {size}: {sum(right[size]) / len(wanted):.3f} of {len(wanted)} right", flush=True)
        with (given.folder / f"{name}.jsonl").open("w") as file:
            for (body, item), small, large in zip(wanted, right["small"], right["large"], strict=True):
                file.write(json.dumps(body | {"domain": item.domain, "small": small, "large": large}) + "\n")


if __name__ == "__main__":
    main()
