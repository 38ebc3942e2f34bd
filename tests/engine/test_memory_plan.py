"""The memory plan is what an engine holds: a bound, and near."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.checkpoints import TinyModel, save
from quire.config.shipped import DEFAULT_MODEL, shipped_models

# Large enough that two per cent of the sum is less than what any part of a model takes.
_SIZES = {
    "max_position_embeddings": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "vocab_size": 4608,
}
MODELS = [
    TinyModel("llama", "LlamaConfig", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 8}),
    TinyModel("qwen3", "Qwen3Config", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}),
    TinyModel("gemma2", "Gemma2Config", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 4,
                                         "head_dim": 64, "sliding_window": 64}),
]  # fmt: skip

# Runs the largest steps, waits until every block of the cache is resident, and tells plan and peak.
_FILL = """
import json, sys, time
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], memory=320 * 2**20, request_memory=2**23, max_model_len=512, threads=2, progress=False,
          weight_cache="off", block_size=64)
params = SamplingParams(max_tokens=4, repetition_penalty=1.2, presence_penalty=0.5, top_p=0.9, logprobs=64,
                        ignore_eos=True,
                        logit_bias={token: 1.0 for token in range(4000)})
core = llm.built.executor.core
llm.generate([[5 + i] * 60 for i in range(64)], params, progress=False)
while core.kv_warmed < core.kv_bytes:
    llm.generate([[5] * 60], params, progress=False)
    time.sleep(0.1)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"parts": llm.built.plan.parts, "peak": int(peak.split()[1]) * 1024}))
"""


@pytest.mark.parametrize("name", [DEFAULT_MODEL, *(model.name for model in MODELS)])
def test_what_was_predicted_is_what_is_measured(name: str, tmp_path: Path) -> None:
    """Within two per cent, with every block, activation and sampling slot used; and never more than the plan."""
    tiny = next((model for model in MODELS if model.name == name), None)
    folder = tmp_path / "model" if tiny is not None else shipped_models()[name]
    if tiny is not None:
        save(tiny, folder)
    run = subprocess.run(
        [sys.executable, "-c", _FILL, str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    held = {part: size for part, size in found["parts"].items() if part != "requests"}
    predicted = sum(held.values())
    print(f"{name}: predicted {predicted / 2**20:.1f} MiB, measured {found['peak'] / 2**20:.1f} MiB", held)
    assert found["peak"] <= predicted + found["parts"]["requests"]
    assert abs(found["peak"] - predicted) < 0.02 * predicted
