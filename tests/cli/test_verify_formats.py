"""quire verify on GGUF and on quantized safetensors: sound files pass, each kind of damage is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import VOCAB, save, tiny_model
from helpers.gguf_files import write_model
from helpers.quantized_folders import FORMATS, mxfp4_folder, quantized_folder
from quire.cli.main import main
from quire.loader import Checkpoint, GGUFFiles, QuantizedSource
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.loader.scan import scan_source
from quire.spec.quantization import Quantization

TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(VOCAB - 3))]


def verify(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, list[str]]:
    """Exit status, and the checks that are not ok as "check status: message"."""
    code = main(["verify", str(path), "--json", "--no-progress"])
    report = json.loads(capsys.readouterr().out)
    found = [f"{c['check']} {c['status']}: {c['message']}" for c in report["checks"] if c["status"] != "ok"]
    return code, found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save(tiny_model("llama2"), folder, torch.float32)
    return folder


@pytest.fixture
def gguf(plain: Path, tmp_path: Path) -> Path:
    return with_tokens(plain, tmp_path / "x.gguf", TOKENS)


def with_tokens(plain: Path, out: Path, tokens: list[str]) -> Path:
    keys = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [1] * (len(tokens) - 3), np.int32),
    }  # fmt: skip
    return write_model(plain, out, "llama", **keys)


def tensor_at(path: Path, name: str) -> int:
    with GGUFFiles(path) as files:
        return files.tensors[name].begin


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_sound_gguf(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = verify(capsys, gguf)
    assert code == 0
    assert all(line.startswith("tokenizer warning") for line in found), found  # its few pieces spell no text


def test_nan_in_a_gguf(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overwrite(gguf, tensor_at(gguf, "blk.1.ffn_up.weight") + 4 * 70, struct.pack("<f", float("nan")))
    code, found = verify(capsys, gguf)
    assert code == 1
    assert "weights failed: model.layers.1.mlp.up_proj.weight: element [1, 6] is NaN or infinite" in found


def test_the_scheme_of_a_gguf(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bits by what is stored, and what is computed: inputs of the codes are rounded to int8."""
    path = tmp_path / "q.gguf"
    assert main(["convert", str(plain), str(path), "--dtype", "q8_0", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(path), "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scheme"]
    assert found["stored"] == "GGUF Q8_0, 8.50 bits per weight"
    assert found["computed"] == "W8A8 g32 sym dynamic"
    for row in found["parts"]:
        if row["part"] != "norms and biases":
            assert 32 * row["stored"] == 34 * row["weights"]


def test_a_scale_of_a_gguf_block_that_is_not_finite(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(plain), str(tmp_path / "q.gguf"), "--dtype", "q8_0", "--quiet"]) == 0
    path = tmp_path / "q.gguf"
    overwrite(path, tensor_at(path, "blk.0.ffn_gate.weight") + 34, np.float16(np.inf).tobytes())
    code, found = verify(capsys, path)
    assert code == 1
    assert "weights failed: model.layers.0.mlp.gate_proj.weight: element [0, 32] is NaN or infinite" in found


def test_a_hole_in_a_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = tiny_model("llama2")
    model = type(wide)("wide", wide.config_class, dict(wide.overrides) | {"intermediate_size": 1024})
    save(model, tmp_path / "m", torch.float32)
    path = write_model(tmp_path / "m", tmp_path / "x.gguf", "llama")
    overwrite(path, tensor_at(path, "blk.0.ffn_up.weight"), bytes(3 * 2**16))
    code, found = verify(capsys, path)
    assert code == 0  # it may be meant
    assert any("model.layers.0.mlp.up_proj.weight: 196608 zero bytes in a row" in line for line in found)


def test_a_gguf_cut_short(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-100])
    code, found = verify(capsys, gguf)
    assert code == 1
    assert any("bytes past the end of the file" in line for line in found)


def test_wrong_shapes_in_a_gguf(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with GGUFFiles(gguf) as files:
        tensors = [OutTensor(name, "F32", tensor.shape) for name, tensor in files.tensors.items()]
        data = {
            name: np.array(files.read(name, 0, tensor.shape[0])) for name, tensor in files.tensors.items()
        }
        plain = {key: value for key, value in files.metadata.items() if isinstance(value, int | float | str)}
    del plain["tokenizer.ggml.model"]
    wrong = [
        OutTensor(t.name, "F32", (t.shape[0] - 1, t.shape[1])) if "blk.1.ffn_up" in t.name else t
        for t in tensors
    ]
    out = tmp_path / "wrong.gguf"
    write_gguf(out, plain, wrong, lambda t: [data[t.name][: t.shape[0]]])
    code, found = verify(capsys, out)
    assert code == 1
    assert any(
        "tensors failed: tensor model.layers.1.mlp.up_proj.weight: shape [95, 64]" in line for line in found
    )


def test_a_gguf_with_more_tokens_than_rows(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_tokens(plain, tmp_path / "x.gguf", [*TOKENS, "one more"])
    code, found = verify(capsys, path)
    assert code == 1
    assert any("tokenizer failed" in line and "do not match" in line for line in found)


@pytest.mark.parametrize("kind", FORMATS)
def test_sound_quantized_checkpoints(
    plain: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = quantized_folder(plain, tmp_path / kind, kind)
    assert verify(capsys, folder) == (0, [])


# A float array of each format, and what becomes NaN when its first number is.
SCALES = {
    "gptq": "scales", "gptq-desc-act": "scales", "gptq-3-bits": "scales", "gptq-2-bits": "scales",
    "bitsandbytes-int8": "SCB",
    "auto-round": "scales", "awq": "scales", "compressed-tensors": "weight_scale", "hqq": "scale",
    "int-quantized": "weight_scale", "int-quantized-static": "weight_scale", "float-quantized": "weight_scale",
    "mxfp4-pack-quantized": "weight_scale", "fbgemm_fp8": "weight_scale", "modelopt": "weight_scale",
    "fp8": "weight_scale_inv", "bitsandbytes": "weight.nested_absmax",
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_scale_that_is_not_finite(
    plain: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(plain, tmp_path / kind, kind, SCALES[kind], as_nan)
    code, found = verify(capsys, folder)
    assert code == 1
    assert "weights failed: model.layers.1.mlp.up_proj.weight: element [0, 0] is NaN or infinite" in found


def as_nan(scales: torch.Tensor) -> torch.Tensor:
    """Of bytes, which are exponents, the one that means NaN."""
    return torch.full_like(scales, 255) if scales.dtype == torch.uint8 else scales * float("nan")


@pytest.mark.parametrize("kind", FORMATS)
def test_an_array_of_another_shape(
    plain: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(
        plain,
        tmp_path / kind,
        kind,
        SCALES[kind],
        lambda array: array[:-1] if array.ndim else array.new_zeros(3),
    )
    code, found = verify(capsys, folder)
    assert code == 1
    assert any("tensors failed: model.layers.1.mlp.up_proj" in line for line in found), found


def test_a_hole_in_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zero bytes are no zeros of the weight: the stored arrays are looked at themselves."""
    wide = tiny_model("llama2")
    model = type(wide)("wide", wide.config_class, dict(wide.overrides) | {"intermediate_size": 4096})
    save(model, tmp_path / "m", torch.float32)

    def hole(array: torch.Tensor) -> torch.Tensor:
        array.reshape(-1)[: 7 * 4096] = 0
        return array

    folder = damaged(tmp_path / "m", tmp_path / "q", "gptq", "qweight", hole)
    code, found = verify(capsys, folder)
    assert code == 0
    assert any("model.layers.1.mlp.up_proj.qweight: 114688 zero bytes in a row" in line for line in found), (
        found
    )


def damaged(plain: Path, out: Path, kind: str, part: str, change: Any) -> Path:
    folder, _ = quantized_folder(plain, out, kind)
    arrays = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    arrays[name] = change(arrays[name].clone()).contiguous()
    save_file(arrays, folder / "model.safetensors")
    return folder


def test_nan_in_eight_bit_floats(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """E4M3 has no infinity; 0x7F and 0xFF are NaN, and 0x7E is the largest number."""
    for code, found in ((0x7F, 1), (0xFF, 1), (0x7E, 0)):

        def change(array: torch.Tensor, code: int = code) -> torch.Tensor:
            array.view(torch.uint8)[3, 5] = code
            return array

        folder = damaged(plain, tmp_path / f"{code}", "float-quantized", "weight", change)
        failed = ["weights failed: model.layers.1.mlp.up_proj.weight: element [3, 5] is NaN or infinite"]
        assert verify(capsys, folder) == (found, failed * found)


@pytest.mark.parametrize("kind", ["float-quantized", "fp8", "int-quantized"])
def test_a_hole_in_eight_bit_numbers(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    wide = tiny_model("llama2")
    model = type(wide)("wide", wide.config_class, dict(wide.overrides) | {"intermediate_size": 2048})
    save(model, tmp_path / "m", torch.float32)

    def hole(array: torch.Tensor) -> torch.Tensor:
        array.view(torch.uint8).reshape(-1)[4096 : 4096 * 20] = 0
        return array

    code, found = verify(capsys, damaged(tmp_path / "m", tmp_path / "q", kind, "weight", hole))
    assert code == 0
    assert any("model.layers.1.mlp.up_proj.weight: 77824 zero bytes in a row" in line for line in found), (
        found
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    mxfp4_folder(folder)
    return folder


def changed_experts(experts: Path, out: Path, part: str, change: Any) -> Path:
    arrays = load_file(experts / "model.safetensors")
    name = f"model.layers.2.mlp.experts.{part}"
    arrays[name] = change(arrays[name].clone()).contiguous()
    out.mkdir()
    (out / "config.json").write_text((experts / "config.json").read_text())
    save_file(arrays, out / "model.safetensors")
    return out


def test_sound_experts(experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And their digests: a changed code is a number like any other, so only digests tell."""
    assert verify(capsys, experts) == (0, [])
    assert main(["verify", str(experts), "--json", "--no-progress"]) == 0
    (tmp_path / "before.json").write_text(capsys.readouterr().out)
    other = changed_experts(experts, tmp_path / "x", "gate_up_proj_blocks", lambda array: array ^ 1)
    assert verify(capsys, other) == (0, [])
    assert main(["verify", str(other), "--digests", str(tmp_path / "before.json"), "--no-progress"]) == 1
    assert "model.safetensors: the content has changed" in capsys.readouterr().out


def test_nan_in_experts(experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """E8M0's 255 is NaN; 254 is 2^127, whose products with E2M1's larger numbers float32 does not hold."""

    def change(array: torch.Tensor) -> torch.Tensor:
        array[1, 2, 0] = 255
        return array

    code, found = verify(capsys, changed_experts(experts, tmp_path / "x", "down_proj_scales", change))
    assert code == 1
    assert found == [
        "weights failed: model.layers.2.mlp.experts.down_proj: element [1, 2, 0] is NaN or infinite"
    ]


@pytest.mark.parametrize(("pages", "holes"), [(15, []), (16, ["experts_blocks"])])
def test_a_hole_in_experts(tmp_path: Path, pages: int, holes: list[str]) -> None:
    blocks = torch.randint(
        1, 256, (4, 512, 4, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    blocks.reshape(-1)[: 4096 * pages] = 0
    scales = torch.full(blocks.shape[:3], 120, dtype=torch.uint8)
    save_file({"experts_blocks": blocks, "experts_scales": scales}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        found = scan_source(QuantizedSource(checkpoint, Quantization("MXFP4", "mxfp4")))
    assert [finding.tensor for finding in found if "blocks" in finding.tensor] == holes
