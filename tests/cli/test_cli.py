"""The command line: what it prints, what it refuses, and with which exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers import drafts
from helpers.memory import memory_for
from helpers.tokenizers import save_whole
from quire.cli.main import main
from quire.util.sizes import format_size, parse_size


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_json_equals_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "generate", str(folder), "--prompt", "Hello there", "--max-tokens", "16", "--temperature", "0",
        "--ignore-eos", "--dtype", "float32", "--json", "--logprobs", "2", "--prompt-logprobs", "1",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = tokenizer("Hello there", return_tensors="pt").input_ids
    with torch.inference_mode():
        whole = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = whole[0, ids.shape[1] :].tolist()
    assert found["prompt"] == "Hello there"
    assert found["prompt_token_ids"] == ids[0].tolist()
    (sample,) = found["outputs"]
    assert sample["token_ids"] == expected
    assert sample["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert sample["finish_reason"] == "length"
    assert len(sample["logprobs"]) == 16
    assert len(sample["logprobs"][0]["top"]) == 2
    pieces = [entry["token"] for entry in sample["logprobs"]]
    assert "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=False)
    assert len(found["prompt_logprobs"]) == len(found["prompt_token_ids"])
    assert found["usage"] == {
        "prompt_tokens": 11, "completion_tokens": 16, "total_tokens": 27, "cached_tokens": 0
    }  # fmt: skip
    timings = found["timings"]
    parts = timings["queue_seconds"] + timings["prefill_seconds"] + timings["decode_seconds"]
    assert parts == pytest.approx(timings["total_seconds"])
    assert timings["time_to_first_token_seconds"] > 0


def test_generate_text_and_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = memory_for(2**30)
    code, out, err = run(
        capsys, "generate", str(folder), "--prompt", "Hi", "--max-tokens", "8", "--memory", str(memory)
    )
    assert code == 0
    assert out.endswith("\n")
    for word in ("weights", "kv", "activations", f"of {format_size(memory)}"):
        assert word in err
    assert (
        run(capsys, "generate", str(folder), "--prompt", "Hi", "--max-tokens", "8", "--quiet", "--n", "2")[0]
        == 0
    )


def test_logprobs_on_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", str(folder), "--prompt", "Hi", "--max-tokens", "3", "--ignore-eos", "--quiet")
    _, text, _ = run(capsys, *words, "--seed", "1")
    _, out, _ = run(capsys, *words, "--seed", "1", "--logprobs", "2", "--prompt-logprobs", "0")
    assert out.startswith(text)
    prompt, sample = out[len(text) :].split("\n\n")
    assert prompt.split()[:3] == ["prompt", "logprob", "rank"]
    assert sample.split("\n")[0].split() == ["token", "logprob", "rank", "most", "likely"]
    rows = sample.strip().split("\n")[1:]
    assert len(rows) == 3
    for row in rows:  # the token, its logprob and rank, and two more with theirs
        assert re.fullmatch(r"\S.* -\d+\.\d{3} +\d+  (\S.* -\d+\.\d{3}(  )?){2}", row), row
    _, out, _ = run(capsys, *words, "--seed", "1", "--logprobs", "0", "--n", "2")
    assert out.count("\nsample ") == 2


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", "--prompt", "Once", "--max-tokens", "2", "--quiet")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert "no model given" in run(capsys, "generate", "--prompt", "Once", "--max-tokens", "2")[2]


def test_prompt_of_ids_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = ("--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json", "--quiet")
    _, by_ids, _ = run(capsys, "generate", str(folder), "--prompt-token-ids", "40,41", *greedy)
    assert json.loads(by_ids)["prompt_token_ids"] == [40, 41]
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    _, by_text, _ = run(capsys, "generate", str(folder), "--prompt", "-", *greedy)
    assert json.loads(by_text)["prompt"] == "Hello"


def test_chat(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["hello", "", "again", "/clear", "third", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    code, out, _ = run(
        capsys, "chat", str(folder), "--quiet", "--max-tokens", "4", "--ignore-eos", "--system", "Be."
    )
    assert code == 0
    assert out.count("\n") >= 3


def test_generate_takes_a_prediction(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("generate", str(folder), "--prompt", "Hello", "--max-tokens", "24", "--temperature", "0", "--quiet",
             "--ignore-eos", "--json")  # fmt: skip
    plain = json.loads(run(capsys, *asked)[1])
    file = tmp_path / "predicted.txt"
    file.write_text(plain["outputs"][0]["text"])
    found = json.loads(run(capsys, *asked, "--prediction", str(file))[1])
    assert found["outputs"] == plain["outputs"]
    used = found["usage"]
    assert used["accepted_prediction_tokens"] == used["accepted_draft_tokens"] > 5
    assert "draft_tokens" not in plain["usage"]
    code, _, error = run(capsys, *asked, "--prediction", str(tmp_path / "none"))
    assert code == 1
    assert "prediction" in error


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "inspect", str(folder), "--json", "--prefill", "64", "--context", "100", "--batch", "3"
    )
    assert code == 0
    found = json.loads(out)
    assert found["architecture"] == "Qwen3ForCausalLM"
    stored = sum(t.numel() for t in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert found["parameters"] == stored
    assert (
        found["kv"]["bytes_per_token"] == 2 * 2 * 2 * 24 * 4
    )  # k and v, layers, kv heads, head_dim, float32
    for step in found["steps"].values():
        assert step["intensity"] == pytest.approx(step["flops"] / step["bytes"])
        assert step["bound_seconds"] > 0
    assert [op["op"] for op in found["ops"][:3]] == ["Embed", "Norm", "Linear"]
    assert (found["scheme"]["stored"], found["scheme"]["computed"]) == ("W32A32", "W32A32")
    parts = {row["part"]: row for row in found["scheme"]["parts"]}
    assert parts.keys() == {"embedding, head", "attention", "feed-forward", "norms and biases"}
    assert sum(row["weights"] for row in parts.values()) == stored
    assert all(row["stored"] == 2 * row["bytes_16_bit"] == 4 * row["weights"] for row in parts.values())
    none = {"format": None, "found": "none"}
    assert found["tokenizer"]["answers"] == {"tool_calls": none, "reasoning": none}
    for name in ("memory", "server_memory"):
        assert sum(found[name]["parts"].values()) == found[name]["sum"] <= found[name]["bound"]
    assert found["server_memory"]["parts"].keys() - found["memory"]["parts"].keys() == {
        "server",
        "connections",
    }
    code, out, _ = run(capsys, "inspect", str(folder), "--json", "--no-measure", "--kv-cache-dtype", "int8")
    kv = json.loads(out)["kv"]
    assert (code, kv["dtype"]) == (0, "i8")
    assert kv["bytes_per_token"] == 2 * 2 * 2 * (24 + 2)  # a byte a number, and bfloat16 scales
    assert kv["scale_bytes_per_token"] == 2 * 2 * 2 * 2
    assert kv["block_bytes_of_16_tokens"] == 16 * 2 * 2 * 2 * (32 + 2)
    code, text, _ = run(capsys, "inspect", str(folder), "--no-measure")
    assert code == 0
    for word in (
        "GQA 4/2 of",
        "q/k norm",
        "KV cache",
        "prefill:",
        "decode:",
        "FLOP/byte",
        "answers: no tool calls",
    ):
        assert word in text
    assert run(capsys, "inspect", str(folder), "--no-measure", "--ops")[0] == 0


def test_inspect_speculation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*options: str) -> dict[str, Any]:
        code, out, _ = run(capsys, "inspect", str(folder), "--json", "--no-measure", *options)
        assert code == 0
        found: dict[str, Any] = json.loads(out)["speculation"]
        return found

    assert report() is None
    config = '{"method": "ngram", "num_speculative_tokens": 5, "recent_outputs": %d}'
    plain, more = (report("--speculative-config", config % tokens) for tokens in (0, 1000))
    assert more["memory"]["proposer"] > plain["memory"]["proposer"] > 0
    assert {entry["drafts"] for entry in plain["expected"]} == {1, 2, 3, 4, 5}
    assert {entry["rate"] for entry in plain["expected"]} == {at / 100 for at in range(50, 100, 5)}
    rounded = report("--draft-model", str(folder))
    assert 0 < rounded["draft_cost"] < 0.5
    draft = json.dumps({"model": str(folder), "quantization": "none"})
    same = report("--speculative-config", draft)
    assert same["draft_cost"] == 1
    assert same["memory"]["weights"] > rounded["memory"]["weights"]
    assert same["memory"]["weights"] > 0 < same["memory"]["kv_bytes_per_token"]
    for found in (plain, same, report("--speculate", "self")):
        for entry in found["expected"]:
            tokens = sum(entry["rate"] ** right for right in range(entry["drafts"] + 1))
            assert entry["tokens"] == pytest.approx(tokens)
            assert entry["speedup"] == pytest.approx(tokens / (1 + entry["drafts"] * found["draft_cost"]))
    assert plain["trees"] is None
    by_width = []
    for width in (1, 4):
        chosen = {"method": "self", "num_speculative_tokens": 8, "top_k": 2, "tree_width": width}
        found = report("--speculative-config", json.dumps(chosen))
        (sibling,), cost = found["trees"]["siblings"], found["draft_cost"]
        by_width.append([entry["speedup"] for entry in found["trees"]["expected"]])
        for entry in found["trees"]["expected"]:
            rate, depth = entry["rate"], entry["depth"]
            assert entry["speedup"] == pytest.approx(entry["tokens"] / (1 + depth * cost))
            if entry["drafts"] == 2:  # a chain, or two guesses in one place
                tokens = 1 + rate + (rate * rate if depth == 2 else (1 - rate) * sibling)
                assert entry["tokens"] == pytest.approx(tokens)
    assert all(narrow <= wide for narrow, wide in zip(*by_width, strict=True))
    assert by_width[0] != by_width[1]
    text = run(capsys, "inspect", str(folder), "--no-measure", "--speculate", "self")[1]
    assert "as trees: 4 guesses in a place, behind 1 of a depth" in text
    text = run(capsys, "inspect", str(folder), "--no-measure", "--speculate", "ngram")[1]
    assert "speculation: ngram" in text
    assert "expected speed-up" in text


def test_inspect_counts_the_one_pass_of_medusa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    medusa = {"method": "medusa", "model": str(drafts.write_medusa(tmp_path / "draft"))}
    options = ["--json", "--no-measure", "--speculative-config", json.dumps(medusa)]
    code, out, _ = run(capsys, "inspect", str(save_whole("smollm3", tmp_path / "target")), *options)
    assert code == 0
    found = json.loads(out)["speculation"]
    assert {entry["drafts"] for entry in found["expected"]} == {1, 2, 3}  # there are three heads
    for entry in found["expected"]:
        assert entry["speedup"] == pytest.approx(entry["tokens"] / (1 + found["draft_cost"]))


def test_inspect_quality(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both formats on a text, by what transformers computes for the reference; int4 is further off than int8."""
    text = tmp_path / "text.txt"
    text.write_text("The oven is lit before the town wakes, and the bread is out by six. " * 3)
    code, out, _ = run(
        capsys, "inspect", str(folder), "--json", "--no-measure", "--quality", "--text", str(text)
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)["quality"]
    int8, int4, cache = found["formats"]
    assert (int8["quantization"], int4["quantization"], int4["head"]) == ("int8", "int4", "i8")
    assert (cache["quantization"], cache["kv"]) == ("none", "i8")
    (text_found,) = found["texts"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids
    weights = {form["quantization"]: form["weight_bytes"] for form in found["formats"]}
    int8, int4, cache = (form["texts"][0] for form in found["formats"])
    assert text_found["name"] == str(text)
    assert ids.shape[1] == text_found["tokens"] + 1 == int8["tokens"] + 1
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss
    assert text_found["perplexity"] == pytest.approx(float(torch.exp(loss)), rel=1e-3)
    assert not text_found["known"]  # random weights know nothing: formats are not ranked by perplexity
    assert int8["perplexity"] is int4["perplexity"] is None
    assert 0 < cache["kl_mean"] < int4["kl_mean"]
    assert int8["kl_error"] < int8["kl_mean"]
    assert 0 < int8["kl_mean"] < int4["kl_mean"] < int4["kl_max"] < 1
    assert 1 >= int8["top1_agreement"] >= int4["top1_agreement"] > 0.5
    assert found["weight_bytes"] == weights["none"] > weights["int8"] > weights["int4"]


def test_inspect_quality_of_one_format_and_its_refusals(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = ("inspect", str(folder), "--no-measure", "--quality", "--quantization", "int4")
    code, out, _ = run(capsys, *quality, "--quantization-group-size", "64")
    assert code == 0
    assert "int4 in groups of 64, head i8" in out
    assert "int8 " not in out.split("quality:")[1]
    for more, message in (
        (("--text", str(tmp_path / "none.txt")), "text: .*No such file"),
        (("--memory", "90MiB"), "need .* but the bound is 90.00 MiB"),
    ):
        code, _, err = run(capsys, *quality, *more)
        assert code != 0
        assert re.search(message, err)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in run(capsys, *quality, "--text", str(tmp_path / "binary"))[2]
    (tmp_path / "short").write_text("a")
    assert "at least 2" in run(capsys, *quality, "--text", str(tmp_path / "short"))[2]
    assert "text: needs --quality" in run(capsys, "inspect", str(folder), "--text", "x")[2]


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (("generate", "{}", "--prompt", "x", "--temperature", "-1"), 1, "temperature"),
        (("generate", "{}", "--prompt", "x", "--max-tokens", "0"), 1, "max_tokens"),
        (
            ("generate", "{}", "--prompt", "x", "--max-tokens", "99k"),
            1,
            "1 prompt tokens and 99000 to generate are 99001",
        ),
        (
            ("generate", "{}", "--prompt", "x", "--device", "cuda"),
            2,
            "device: 'cuda' needs --executor torch",
        ),
        (
            ("generate", "{}", "--prompt", "x", "--quantization", "awq"),
            2,
            "'awq' does not match the checkpoint, which is not",
        ),
        (
            ("generate", "{}", "--prompt", "x", "--load-format", "gguf"),
            2,
            "'gguf' does not match the model, which is in safe",
        ),
        (("generate", "{}", "--prompt", ""), 1, "prompt"),
        (("generate", "{}", "--prompt-token-ids", "1,x"), 1, "prompt-token-ids"),
        (("generate", "{}", "--prompt", "x", "--memory", "1MiB"), 1, "raise --memory"),
        (("generate", "{}", "--prompt", "x", "--max-model-len", "100000"), 2, "max_model_len"),
        (("generate", "{}", "--prompt", "x", "--block-size", "8"), 2, "block_size"),
        (
            ("generate", "{}", "--prompt", "x", "--executor", "torch", "--device", "nowhere"),
            2,
            "device: 'nowhere'",
        ),
        (
            ("generate", "{}", "--prompt", "x", "--executor", "torch", "--device", "cuda:7"),
            2,
            "device: 'cuda:7'",
        ),
        (("generate", "no/such/folder/at/all", "--prompt", "x"), 1, "no such file or folder"),
        (("inspect", "."), 1, "config.json"),
    ],
)
def test_refusals(
    folder: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], status: int, words: str
) -> None:
    code, out, err = run(capsys, *(a.format(folder) for a in args))
    assert code == status, err
    assert words in err
    assert not out
    assert "Traceback" not in err


def test_forced_isa_that_cannot_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", "sse9")
    code, _, err = run(capsys, "generate", str(folder), "--prompt", "x")
    assert code == 2
    assert "sse9" in err


def test_help_and_version() -> None:
    for args, word in (
        (["--help"], "generate"),
        (["--version"], "quire 0."),
        (["generate", "--help"], "--memory"),
    ):
        command = [sys.executable, "-m", "quire.cli.main", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert word in done.stdout


def test_a_server_without_torch_never_loads_it(folder: Path) -> None:
    script = (
        "import sys; from quire import LLM, SamplingParams\n"
        f"LLM({str(folder)!r}, progress=False).generate('Hi', SamplingParams(max_tokens=2))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 * 2**30), ("6g", 6 * 2**30), ("1.5 MB", 1_500_000), ("123", 123), ("2KiB", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "6 gibi", "-1", "1e9"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_as_people_read_them() -> None:
    assert [format_size(n) for n in (5, 2048, 3 * 2**30)] == ["5 B", "2.00 KiB", "3.00 GiB"]
