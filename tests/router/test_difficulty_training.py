"""What tells easy requests from hard ones: its probabilities hold, it costs less than chance, and its file says all."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.cli.main import main
from quire.offline.difficulty_training import LabelledRequests, RoutingTable, read_labels, train_difficulty
from quire.routing.difficulty import DifficultyModel, features_of, read_difficulty

WORDS = ["red", "blue", "green", "cat", "dog", "house", "tree", "river", "stone", "cloud"]


def written(path: Path, count: int = 1200, seed: int = 1, *, mixed: bool = False) -> Path:
    """Sums and products whose numbers have up to five digits: small is right the less often the more there are, large
    always. `mixed`: labels belong to other requests."""
    rng = random.Random(seed)
    lines, smalls = [], []
    for _ in range(count):
        digits, sign = rng.randint(1, 5), rng.choice("+*")
        numbers = [str(rng.randint(10 ** (digits - 1), 10**digits - 1)) for _ in range(2)]
        lines.append(
            {"prompt": f"What is {numbers[0]} {sign} {numbers[1]}? {' '.join(rng.sample(WORDS, 3))}"}
        )
        odds = 2.0 * (3 - digits) + (1.0 if sign == "+" else -1.0)
        smalls.append(rng.random() < 1 / (1 + math.exp(-odds)))
    if mixed:
        rng.shuffle(smalls)
    path.write_text(
        "".join(json.dumps(each | {"small": small}) + "\n" for each, small in zip(lines, smalls, strict=True))
    )
    return path


Trained = tuple[LabelledRequests, DifficultyModel, RoutingTable]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The labels, and what was learned for 95 % of the quality."""
    labels = read_labels(written(tmp_path_factory.mktemp("difficulty") / "labels.jsonl"))
    return labels, *train_difficulty(labels, lambda table: table.for_quality(0.95), 0.1)


def test_probabilities_hold(trained: Trained) -> None:
    """Groups of requests have small right as often as was said, out of fold; overconfident ones do not."""
    labels, _, table = trained
    assert table.calibration_error < 0.06
    assert all(abs(said - was) < 0.12 for said, was, _ in table.bins())
    logits = np.log(table.probabilities / (1 - table.probabilities))
    for factor in (4.0, 0.25):
        wrong = RoutingTable(1 / (1 + np.exp(-factor * logits)), labels, 0.1)
        assert wrong.calibration_error > 0.1, factor


def test_the_file_holds_for_requests_that_it_has_not_seen(tmp_path: Path, trained: Trained) -> None:
    """Its probabilities, computed without numpy, and the quality at its threshold."""
    model = read_difficulty(msgspec.json.encode(trained[1]))
    others = read_labels(written(tmp_path / "others.jsonl", seed=2))
    table = RoutingTable(np.array([model.suffices(each) for each in others.features]), others, 0.1)
    assert table.calibration_error < 0.06
    share, quality = table.at(model.threshold)
    assert 0.25 < share < 0.6
    assert quality > 0.93
    assert model.report["requests"] == 1200


def test_equal_quality_costs_less_than_at_random(
    trained: Trained,
) -> None:
    table = trained[2]
    for part in (0.9, 0.95, 0.98):
        share, quality = table.at(table.for_quality(part))
        chance = table.random_share(quality)
        assert chance is not None
        assert quality >= part * table.large
        assert table.cost(share) < table.cost(chance) - 0.1


def test_labels_without_a_pattern_gain_nothing(tmp_path: Path) -> None:
    """The control of the last test: what has nothing to learn is as good as chance."""
    labels = read_labels(written(tmp_path / "mixed.jsonl", 900, mixed=True))
    _, table = train_difficulty(labels, lambda table: 0.5, 0.1)
    for asked in (0.2, 0.5, 0.8):
        share, quality = table.at(table.for_small_share(asked))
        chance = table.large + share * (table.small - table.large)
        assert abs(quality - chance) < 0.04


def test_the_table_counts_what_was_labelled() -> None:
    labels = LabelledRequests([{}] * 4, np.array([1.0, 0.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0, 1.0]))
    table = RoutingTable(np.array([0.9, 0.8, 0.3, 0.1]), labels, 0.2)
    assert [table.at(threshold) for threshold in (0.95, 0.9, 0.8, 0.3, 0.0)] == [
        (0.0, 0.75), (0.25, 0.75), (0.5, 0.5), (0.75, 0.75), (1.0, 0.5)
    ]  # fmt: skip
    assert table.for_quality(1.0) == 0.3
    assert table.for_small_share(0.5) == 0.8
    tied = RoutingTable(
        np.array([0.9, 0.9, 0.3, 0.3]), labels, 0.2
    )  # 0.75 after one of the first two is no threshold
    assert [tied.at(tied.for_quality(part)) for part in (1.0, 0.66)] == [(0.0, 0.75), (1.0, 0.5)]
    assert table.cost(0.75) == pytest.approx(0.4)
    assert table.random_share(0.625) == pytest.approx(0.5)
    assert table.random_share(0.8) is None


def test_the_command_writes_what_was_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(tmp_path / "labels.jsonl", 200), tmp_path / "difficulty.json"
    assert (
        main(["train-router", str(file), "--out", str(out), "--small-share", "0.25", "--small-cost", "0.2"])
        == 0
    )
    model, table = train_difficulty(read_labels(file), lambda table: table.for_small_share(0.25), 0.2)
    assert read_difficulty(out.read_bytes()) == model
    said = capsys.readouterr().out
    assert "\n".join(table.lines()) in said
    assert "to the small model: 25% of requests" in said
    assert main(["train-router", str(file), "--out", str(out), "--quality", "2"]) != 0


def test_what_is_wrong_with_a_line_is_said(tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", 60).read_text().splitlines()
    for wrong, message in (
        ("{", "line 61: is not a request"), ('{"prompt": "x"}', "line 61: is not a request"),
        ('{"prompt": "x", "small": 2}', "line 61: needs messages"), ('{"small": true}', "line 61: needs messages"),
    ):  # fmt: skip
        path = tmp_path / "wrong.jsonl"
        path.write_text("\n".join([*good, wrong]))
        with pytest.raises(ValueError, match=message):
            read_labels(path)
    path.write_text("\n".join(good[:49]))
    with pytest.raises(ValueError, match="49 lines are fewer than the 50"):
        read_labels(path)
    path.write_text('{"prompt": "x", "small": true}\n' * 60)
    with pytest.raises(ValueError, match="always, or never"):
        read_labels(path)
    for data in (b"{}", b"[", b'{"format":"quire difficulty 1","threshold":2,"bias":0,"weights":{}}'):
        with pytest.raises(ValueError):
            read_difficulty(data)


def test_features_are_made_of_any_body() -> None:
    """What is no text has none, and nothing raises."""
    chat = {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Add 17 and 4."}]
    }
    found = features_of(chat)
    assert found is not None
    assert {"add", "2 digits", "1 digits", "add 2 digits", "system: brief", "last user"} <= found.keys()
    parts = [{"type": "text", "text": "Add 17 and 4."}]
    assert features_of({"messages": [chat["messages"][0], {"role": "user", "content": parts}]}) == found
    assert features_of({"input": "x"}) == features_of({"prompt": "x"})
    asked, system = chat["messages"][1:], [{"type": "text", "text": "Be brief"}]
    assert features_of({"messages": asked, "system": system}) == features_of(
        {"messages": asked, "instructions": "Be brief"}
    )
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "21"}]}
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "21"}
    items = features_of({"input": [*asked, said, *asked, {"type": "reasoning", "content": []}, call, result]})
    assert items is not None
    assert {"last tool", "add", "2 digits"} <= items.keys()
    assert features_of({"input": [*asked, {"type": "item_reference", "id": "1"}]}) is None
    long = "7" * 10**6
    assert features_of({"prompt": long})["size of numbers"] < 8  # type: ignore[index]
    odd = (None, 5, "", [], {}, [5], [[]], [{}], [{"role": [], "content": "x"}], [{"role": "user", "content": 5}],
           [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}], [{"role": "user", "content": [5]}],
           [{"role": "user", "content": [{"type": [], "text": "x"}]}], [{"role": "user", "content": None}])  # fmt: skip
    for value in odd:
        for field in ("messages", "input", "prompt"):
            assert features_of({field: value, "tools": value}) is None
    assert features_of({"prompt": "x", "instructions": 5}) is None
    assert features_of({"prompt": "x", "system": [5]}) is None
