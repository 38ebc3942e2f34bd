"""quire inspect of models that no test machine can hold: headers and config files are all it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.loader import LoadRules
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.spec.facts import read_model
from quire.util.platform import resident_bytes

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "eos_token_id": 128001, "bos_token_id": 128000,
}  # fmt: skip


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A folder whose weights are a header and a hole of their size; returns that size in bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model(folder).spec
    header, at = {}, 0
    for param in lower(spec, NumberFormats()).params:
        for part in param.parts:
            shape = [part.rows, param.cols] if param.cols else [part.rows]
            size = 2 * part.rows * max(param.cols, 1)
            header[part.tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at += size
    assert not LoadRules.of(spec, quantized=False).stacks
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + at)
    return at


def test_a_model_of_141_gigabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sparse_checkpoint(tmp_path, LLAMA_70B)
    assert size == 141_107_412_992  # 70.55 billion parameters
    before = resident_bytes()
    assert main(["inspect", str(tmp_path), "--json", "--no-measure", "--memory", "160GiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert resident_bytes() - before < 256 * 2**20
    assert report["stored"] == {"BF16": {"tensors": 723, "bytes": size, "dequantized": 0}}
    assert report["kv"]["bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert report["tokenizer"] is None
    assert report["memory"]["parts"]["weights"] >= size
    assert main(["inspect", str(tmp_path), "--json", "--no-measure", "--memory", "4GiB"]) == 0
    assert "cannot hold one sequence" in json.loads(capsys.readouterr().out)["memory"]["error"]


def test_an_unusable_tokenizer_is_reported(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "vocab.json").write_text("{}")
    command = [sys.executable, "-m", "quire.cli.main", "inspect", str(tmp_path), "--no-measure"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the tokenizer cannot be used" in found.stdout
    assert "a bare vocabulary (vocab.json) but no tokenizer.json" in found.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_after_the_pipe_is_closed(folder: Path, unbuffered: str) -> None:
    """As under `| head -1`: no traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "quire.cli.main", "inspect", str(folder), "--no-measure"]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(write)
    assert (found.returncode, found.stderr) == (1, "")
