"""quire eval: perplexity as transformers has it, comparisons, plots, tasks, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
import transformers

from helpers.tokenizers import save_whole
from quire.cli.main import main
from quire.offline.texts import TEXT

FLOATS = ("--dtype", "float32", "--threads", "1", "--quiet")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT[:300].encode("ascii", "ignore").decode())
    return path


@pytest.mark.parametrize("stride", [16, 40, 64])
def test_perplexity_equals_transformers(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str], stride: int
) -> None:
    """Windows of 64 tokens: each token is predicted in the first window that has it."""
    code, out, _ = run(
        capsys, "eval", "ppl", str(folder), "--eval", str(text), "--window", "64", "--stride", str(stride),
        "--json", *FLOATS,
    )  # fmt: skip
    assert code == 0
    (found,) = json.loads(out)["tables"]["texts"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids
    losses, done = [], 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + 64, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : max(done - begin, 0)] = -100
        with torch.inference_mode():
            loss = model(ids[:, begin:end], labels=labels).loss
        losses.append((loss.item(), int((labels[:, 1:] != -100).sum())))
        done = end
        if end == ids.shape[1]:
            break
    count = sum(n for _, n in losses)
    expected = torch.tensor(sum(loss * n for loss, n in losses) / count).exp().item()
    assert found["tokens"] == count
    assert found["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_kl_against_another_checkpoint(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The original is --against; a result beyond the limit ends with status 1; the page has every plot."""
    torch.manual_seed(7)
    other, page = save_whole("qwen3", tmp_path / "other"), tmp_path / "page.html"
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.02)
    model.save_pretrained(other)
    words = ("eval", "kl", str(other), "--against", str(folder), "--eval", str(text), *FLOATS)
    code, out, _ = run(capsys, *words, "--json", "--html", str(page))
    result = json.loads(out)
    assert result["kind"] == "eval kl"
    assert 0 < result["metrics"]["kl_mean"]["value"] < result["metrics"]["kl_p99"]["value"]
    assert code == (1 if result["notes"] else 0)
    assert len(result["tables"]["layer_errors"]) == 2
    assert {row["kind"] for row in result["tables"]["channels"]} >= {"qkv", "o", "down"}
    html = page.read_text()
    for title in ("KL divergence of each prediction", "Error of the residual stream", "Energy of the salient 1 %",
                  "Channels of layers.", "Weights"):  # fmt: skip
        assert title in html
    assert run(capsys, *words, "--max-kl", "1e-9")[0] == 1
    assert run(capsys, *words, "--max-kl", "1e-9", "--force")[0] == 0


def test_formats_of_one_checkpoint(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --against a model is compared with itself in floats."""
    for format_ in (("--kv-cache-dtype", "int8"), ("--quantization", "int8")):
        code, out, _ = run(capsys, "eval", "agree", str(folder), *format_, "--json", *FLOATS)
        assert code == 0
        metrics = json.loads(out)["metrics"]
        assert 0.5 < metrics["greedy_agreement"]["value"] <= 1
        assert metrics["common_tokens"]["value"] > 0
    code, out, _ = run(capsys, "eval", "agree", str(folder), "--against", str(folder), "--json", *FLOATS)
    metrics = json.loads(out)["metrics"]
    assert metrics["greedy_agreement"]["value"] == metrics["same_answers"]["value"] == 1
    code, out, _ = run(
        capsys, "eval", "kl", str(folder), "--kv-cache-dtype", "int8", "--eval", str(text), *FLOATS
    )
    assert "KV cache f32" in out


def test_refusals(folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names the option and the limit; nothing is loaded for them."""
    model, none = str(folder), str(tmp_path / "none.txt")
    other = save_whole("qwen3", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for words, message in (
        (("ppl", model, "--eval", none), "text: .*No such file"),
        (("ppl", model, "--eval", str(text), "--window", "300"), "window: 300 is not between 2 and .* 256"),
        (
            ("ppl", model, "--eval", str(text), "--window", "64", "--stride", "65"),
            "stride: 65 is not between 1 and",
        ),
        (("kl", model), "kl: needs --against MODEL, or a --kv-cache-dtype"),
        (("kl", model, "--against", str(other), "--eval", str(text)), "another tokenizer"),
        (("kl", model, "--against", model, "--max-kl", "-1"), "max_kl: -1"),
        (("tasks", model), "tasks: --tasks names them"),
        (("nonsense", model), "invalid choice"),
    ):
        try:
            code, _, err = run(capsys, "eval", *words, *FLOATS)
        except SystemExit as stopped:
            code, err = stopped.code, capsys.readouterr().err  # type: ignore[assignment]
        assert code != 0
        assert re.search(message, err), err
    short = tmp_path / "short.txt"
    short.write_text("Hello there")
    code, _, err = run(capsys, "eval", "ppl", model, "--eval", str(short), "--window", "64", *FLOATS)
    assert code == 2
    assert "the text has 11 tokens, fewer than a window of 64" in err


HARNESS = """
import json, os, sys, urllib.request
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert options["--model"] == "local-completions", options
if options["--tasks"] != "known":
    sys.exit("Tasks were not found: " + options["--tasks"])
given = dict(part.split("=", 1) for part in options["--model_args"].split(","))
body = {"model": given["model"], "prompt": [[5, 6, 7]], "echo": True, "logprobs": 1, "max_tokens": 1}
request = urllib.request.Request(given["base_url"], json.dumps(body).encode(), {"Content-Type": "application/json"})
found = json.load(urllib.request.urlopen(request))["choices"][0]["logprobs"]["token_logprobs"]
folder = os.path.join(options["--output_path"], "evaluated")
os.mkdir(folder)
result = {"known": {"alias": "known", "acc,none": found[1], "acc_stderr,none": 0.25, "acc_norm,flexible": 0.5}}
json.dump({"results": result}, open(os.path.join(folder, "results_1.json"), "w"))
"""


def test_tasks_run_over_the_api(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the harness's place asks the server as the harness does; tests/clients runs the real one."""
    harness = tmp_path / "lm_eval"
    harness.write_text(f"#!{sys.executable}\n{HARNESS}")
    harness.chmod(harness.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    code, out, err = run(
        capsys, "eval", "tasks", str(folder), "--tasks", "known", "--limit", "3", "--json", *FLOATS
    )
    assert code == 0, err
    rows = json.loads(out)["tables"]["tasks"]
    assert rows[0]["value"] < 0
    assert rows[0]["error"] == 0.25
    assert rows[1] == {"task": "known", "metric": "acc_norm (flexible)", "value": 0.5, "error": None}
    code, _, err = run(capsys, "eval", "tasks", str(folder), "--tasks", "other", *FLOATS)
    assert code == 1
    assert "Tasks were not found: other" in err
    monkeypatch.setenv("QUIRE_LM_EVAL", "no-such-command")
    assert "not installed" in run(capsys, "eval", "tasks", str(folder), "--tasks", "known", *FLOATS)[2]


def test_a_start_says_what_a_lossy_cache_costs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once, then read; above the limit only with force; nothing for an exact cache."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    words = ("generate", str(folder), "--prompt", "Hi", "--max-tokens", "2", "--threads", "1")
    lossy = (*words, "--kv-cache-dtype", "int8")
    code, _, err = run(capsys, *lossy)
    assert code == 0
    assert "measuring what the int8 KV cache costs" in err
    line = next(line for line in err.splitlines() if "KL mean" in line)
    code, _, err = run(capsys, *lossy)
    assert line in err
    assert "measuring" not in err
    (kept,) = (tmp_path / "quality").iterdir()
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"kl_mean": 0.5}))
    code, out, err = run(capsys, *lossy)
    assert (code, out) == (1, "")
    assert "mean KL divergence of 0.500, above the limit of 0.1" in err
    assert run(capsys, *lossy, "--kv-cache-quality", "force")[0] == 0
    assert "KL mean" not in run(capsys, *lossy, "--kv-cache-quality", "off")[2]
    assert "KL mean" not in run(capsys, *words)[2]
    kept.write_text("{damaged")
    assert "measuring" in run(capsys, *lossy)[2]
