"""The shipped model as GGUF in llama.cpp: the same token ids, the same prompts, the same greedy answers.

`make test-model`; it installs llama.cpp's server from the package index into build/llama_cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.default_model.backends import BACKENDS
from tools.default_model.evaluate import stop_ids
from tools.default_model.handwritten import load, run
from tools.default_model.tokenizer import load as tokenizer_of

from helpers.memory import memory_for
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.loader import DEFAULT_MODEL, resolve_model

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
PACKAGE = "xllamacpp==2026.10.11549"
NEAR = 0.05  # logits: both programs round, in other places, so a nearer tie may fall either way
MOST = 48


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has llama.cpp."""
    folder = ROOT / "build" / "llama_cpp"
    done = folder / ".installed"
    if not done.exists() or done.read_text() != PACKAGE:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", PACKAGE], check=True)
        done.write_text(PACKAGE)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "out.gguf"
    assert main(["convert", DEFAULT_MODEL, str(path), "--dtype", "float32", "--quiet"]) == 0
    return path


def ask(python: Path, gguf: Path, requests: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    command = [str(python), str(Path(__file__).with_name("llama_cpp.py")), str(gguf)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, input=json.dumps(requests), stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_equal_ids(python: Path, gguf: Path) -> None:
    tokenizer = tokenizer_of(resolve_model(DEFAULT_MODEL))
    texts = [item.prompt() for item in load()]
    texts += [
        line for name in ("README.md", "docs/server.md") for line in (ROOT / name).read_text().split("\n\n")
    ]
    requests = [("/tokenize", {"content": t, "add_special": False, "parse_special": True}) for t in texts]
    for text, found in zip(texts, ask(python, gguf, requests), strict=True):
        assert found["tokens"] == tokenizer.encode(text).ids, text


def test_equal_prompts_and_answers(python: Path, gguf: Path) -> None:
    """Chats without tools through llama.cpp's own reading of the template, and their answers from its weights."""
    items = [item for item in load() if item.turns and not item.tools][::8]
    chats = [[turn.message() for turn in item.turns] for item in items]
    prompts = ask(python, gguf, [("/apply-template", {"messages": chat}) for chat in chats])
    assert [found["prompt"] for found in prompts] == [item.prompt() for item in items]
    with LLM(gguf, dtype="float32", progress=False, memory=memory_for(2**30)) as llm:
        ids = [llm.encode_chat(chat) for chat in chats]
        params = SamplingParams(temperature=0.0, max_tokens=MOST, logprobs=2)
        ours = [output.outputs[0] for output in llm.generate(ids, params)]
    body = {"n_predict": MOST, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    theirs = ask(python, gguf, [("/completion", {"prompt": prompt, **body}) for prompt in ids])
    equal = 0
    for mine, their in zip(ours, theirs, strict=True):
        pairs = list(zip(mine.token_ids, their["tokens"], strict=False))
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        equal += at is None
        if at is not None:
            assert mine.logprobs is not None
            _, first, second = mine.logprobs[at]
            assert first.logprob - second.logprob < NEAR
        elif mine.finish_reason == "stop":
            assert len(mine.token_ids) - len(their["tokens"]) in {0, 1}  # with or without the end
    assert equal > 0.9 * len(ours)


def test_prompts_written_by_hand_on_both_executors() -> None:
    """All of them in float32 through Quire and through the code that trained the model."""
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = tokenizer_of(folder)
    found = [
        run(load(), BACKENDS[name](folder, stop_ids(tokenizer)), tokenizer) for name in ("quire", "torch")
    ]
    same = [one.said == other.said for one, other in zip(*found, strict=True)]
    assert sum(same) > 0.98 * len(same)
