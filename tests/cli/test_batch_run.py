"""quire batch run: one input, run to its end, whatever happens in between."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.memory import memory_for
from helpers.pooling_folders import pooling_folder
from quire.cli.main import main
from quire.server.batches.batch_lines import order_of

OPTIONS = ["--threads", "1", "--max-model-len", "200", "--quiet", "--json"]


def request(custom_id: str, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "seed": 1} | fields
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line) + "\n"


def run(
    folder: Path, where: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str] = OPTIONS
) -> tuple[int, dict[str, Any]]:
    words = [
        "batch",
        "run",
        str(folder),
        "-i",
        str(where / "in.jsonl"),
        "-o",
        str(where / "out.jsonl"),
        *options,
        "--memory",
        str(memory_for(2**29)),
    ]
    status = main(words)
    out = capsys.readouterr().out
    return status, json.loads(out) if out else {}


def results(where: Path) -> dict[str, Any]:
    lines = (where / "out.jsonl").read_text().splitlines()
    found = {line["id"]: line for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_an_interrupted_run_goes_on_after_the_last_whole_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "".join(request(f"r{i}", f"Number {i}") for i in range(6))
    source += "no json\n\n" + request("r1", "again") + request("bad", "x", temperature=-1) + request("", "x")
    (tmp_path / "in.jsonl").write_text(source)
    status, summary = run(folder, tmp_path, capsys)
    assert status == 1
    assert (summary["requests"], summary["completed"], summary["failed"]) == (10, 6, 4)
    assert summary["completion_tokens"] == 24
    whole = results(tmp_path)
    codes = {name: line["error"]["code"] for name, line in whole.items() if line["error"]}
    assert codes == {
        "batch_req_7": "invalid_json_line", "batch_req_9": "duplicate_custom_id", "batch_req_11": "invalid_custom_id",
    }  # fmt: skip
    assert whole["batch_req_10"]["response"]["status_code"] == 400
    assert {line["custom_id"] for line in whole.values() if line["response"]} == {
        *(f"r{i}" for i in range(6)),
        "bad",
    }

    kept = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[:4]
    (tmp_path / "out.jsonl").write_bytes(b"".join(kept) + b'{"id": "batch_req_1"')
    status, summary = run(folder, tmp_path, capsys)
    assert (summary["before"], summary["completed"] + summary["failed"]) == (4, 6)
    again = results(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes().startswith(b"".join(kept))
    assert again.keys() == whole.keys()
    for name, line in again.items():  # the same answers, whatever ran beside them
        for one in (line, whole[name]):
            if one["response"] and one["response"]["status_code"] == 200:
                one["response"] = [choice["text"] for choice in one["response"]["body"]["choices"]]
        assert line["custom_id"] == whole[name]["custom_id"]
        if isinstance(line["response"], list):
            assert line["response"] == whole[name]["response"]


def test_vectors_and_scores_come_in_batches_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = pooling_folder("bert", tmp_path / "bert")
    asked = {
        "/v1/embeddings": {"input": "a b"},
        "/v1/score": {"text_1": "a b", "text_2": ["a b", "c"]},
        "/v1/rerank": {"query": "a b", "documents": ["c", "a b"]},
        "/classify": {"input": "a"},
    }
    lines = ({"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in asked.items())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, summary = run(folder, tmp_path, capsys, ["--threads", "1", "--quiet", "--json"])
    assert (status, summary["completed"], summary["failed"]) == (1, 3, 1)
    found = {line["custom_id"]: line for line in results(tmp_path).values()}
    assert found.pop("/classify")["error"]["code"] == "invalid_url"
    bodies = {url: line["response"]["body"] for url, line in found.items()}
    assert len(bodies["/v1/embeddings"]["data"][0]["embedding"]) == 48
    assert bodies["/v1/score"]["data"][0]["score"] == pytest.approx(1)
    assert [result["index"] for result in bodies["/v1/rerank"]["results"]] == [1, 0]


def test_the_output_of_another_input_is_not_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(request("a", "x"))
    (tmp_path / "out.jsonl").write_text('{"id":"batch_req_1","custom_id":"b"}\n')
    words = ["batch", "run", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--quiet"]
    assert main(words) == 2
    assert "it is the output of another input" in capsys.readouterr().err
    (tmp_path / "out.jsonl").write_text("my notes\n")
    assert main(words) == 2
    assert "no output of a batch" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "my notes\n"
    words[words.index("-o") + 1] = words[words.index("-i") + 1]
    assert main(words) == 2
    assert "output_file: is the input file" in capsys.readouterr().err


def test_requests_with_the_same_beginning_are_neighbours(tmp_path: Path) -> None:
    """Whatever the order of lines and of fields; and every line is there once."""
    rng = random.Random(5)
    lines = []
    for system in range(4):
        for question in range(25):
            messages = [
                {"role": "system", "content": f"{system} " * 400},
                {"role": "user", "content": str(question)},
            ]
            fields = [("messages", messages), ("max_tokens", question), ("model", "m")]
            rng.shuffle(fields)
            line = {"custom_id": f"{system}-{question}", "method": "POST", "url": "/v1/chat/completions"}
            lines.append(json.dumps({"body": dict(fields)} | line) + "\n")
    rng.shuffle(lines)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(lines))
    order = order_of(path, 2**20)
    data = path.read_bytes()
    found = [json.loads(data[offset:].split(b"\n")[0])["custom_id"] for offset in order.offsets.tolist()]
    assert sorted(order.numbers.tolist()) == list(range(1, 101))
    assert [json.loads(lines[n - 1])["custom_id"] for n in order.numbers.tolist()] == found
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(found))
    assert changes == 3
