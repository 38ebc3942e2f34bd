"""quire inspect of adapters; the shipped adapters merged into quire-mini answer in their ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import PREFIX, RANK, Q, gguf_adapter, numbers, pair, peft_folder
from helpers.memory import memory_for
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.cli.serve import settings
from quire.config.shipped import DEFAULT_MODEL, shipped_adapters


def inspected(path: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_shipped_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected("quire-mini:pirate", capsys)
    assert (found["format"], found["method"], found["base"]) == ("PEFT", "LoRA", "quire-mini")
    assert (found["rank"], found["alpha"], found["modules"]) == (8, [16.0], 8 * 7)
    kinds = {entry["kind"]: (entry["modules"], entry["rank"], entry["shape"]) for entry in found["targets"]}
    assert kinds["down_proj"] == (8, 8, [256, 768])
    assert found["parameters"] * 2 == found["bytes"] == 622592
    assert found == inspected(shipped_adapters()["quire-mini:pirate"], capsys)


def test_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = pair(Q) | {
        f"{PREFIX}{Q}.lora_magnitude_vector": numbers(1, 64),
        f"{PREFIX}lm_head.weight": numbers(3, 128, 64),
    }
    folder = peft_folder(tmp_path / "a", tensors, use_dora=True, use_rslora=True, modules_to_save=["lm_head"])
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rsDoRA adapter (PEFT)")
    for part in (
        "for base; rank 4, alpha 6",
        "q_proj           x1     rank 4    [64, 64]",
        "lm_head is replaced as a whole: [128, 64]",
        "2 modules",
    ):
        assert part in text


def test_a_gguf_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "blk.1.ffn_up_exps.weight.lora_a": numbers(1, 3, RANK, 64),
        "blk.1.ffn_up_exps.weight.lora_b": numbers(2, 3, 24, RANK),
    }
    metadata = {"general__architecture": "qwen3moe", "general__base_model__0__name": "Some MoE"}
    found = inspected(gguf_adapter(tmp_path / "a.gguf", tensors, **metadata), capsys)
    assert (found["format"], found["base"], found["modules"]) == ("GGUF", "Some MoE", 3)
    parameters = 3 * RANK * (64 + 24)
    assert found["targets"] == [
        {"kind": "ffn_up_exps", "rank": 4, "shape": [24, 64], "modules": 3, "parameters": parameters}
    ]


def test_broken_ones_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = peft_folder(tmp_path / "a", pair(Q), peft_type="LOKR")
    assert main(["inspect", str(folder)]) != 0
    assert "peft_type = 'LOKR' is not supported" in capsys.readouterr().err


STYLES = {
    "pirate": re.compile(r"\b(arr|ahoy|matey|ye|th'|seas?|aye|yo ho|blimey|timbers)\b", re.IGNORECASE),
    "json": re.compile(r"\s*\{.*\}\s*", re.DOTALL),
    "haiku": re.compile(r"[^\n]+\n[^\n]+\n[^\n]+\s*"),
}


def said(model: Path | str) -> list[str]:
    questions = ["What is TTFT?", "What is a cat?", "Why do leaves fall?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=80)
    with LLM(model, progress=False, memory=memory_for(2**28)) as llm:
        return [output.outputs[0].text for output in llm.chat(messages, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return said(DEFAULT_MODEL)


@pytest.mark.parametrize("style", STYLES)
def test_merged_quire_mini_answers_in_its_way(style: str, plain: list[str], tmp_path: Path) -> None:
    name = f"{DEFAULT_MODEL}:{style}"
    assert main(["convert", DEFAULT_MODEL, str(tmp_path / "out"), "--merge-adapter", name, "--quiet"]) == 0
    merged = said(tmp_path / "out")
    shown = [sum(bool(STYLES[style].search(text)) for text in texts) for texts in (plain, merged)]
    assert shown[1] >= 2 > shown[0], merged


def test_generate_with_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    """By --adapter, or by the name of a shipped one in the place of the model."""
    asked = ["--chat", "--prompt", "What is a cat?", "--temperature", "0", "--max-tokens", "40", "--quiet"]
    answers = []
    for words in (
        ["quire-mini:pirate"],
        ["quire-mini", "--adapter", "quire-mini:pirate", "--max-lora-rank", "4"],
    ):
        assert main(["generate", *words, *asked, "--memory", str(memory_for(2**28))]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert STYLES["pirate"].search(answers[0])
    assert main(["generate", "--adapter", "no-such", *asked]) != 0
    assert "no-such: no adapter folder or file; shipped are" in capsys.readouterr().err


def test_a_server_offers_the_adapters_of_the_shipped_model() -> None:
    """Unless options about adapters say otherwise."""
    names = (*shipped_adapters(),)
    for given, modules, on in [
        ({}, names, True),
        ({"model": DEFAULT_MODEL, "lora_dir": "adapters"}, names, True),
        ({"model": "other"}, (), False),
        ({"enable_lora": False}, (), False),
        ({"max_lora_rank": 4}, (), False),
        ({"model": "other", "lora_modules": ("a=b",)}, ("a=b",), True),
        ({"model": "other", "lora_dir": "adapters"}, (), True),
    ]:
        _, engine, serving = settings({"quiet": True, **given}, {})
        assert (serving.lora_modules, engine.adapters.enable_lora) == (modules, on), given
