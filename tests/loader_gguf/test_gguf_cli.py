"""`quire` on a .gguf file with its own tokenizer, on a folder that holds one, and on split files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from helpers.checkpoints import VOCAB, save, tiny_model
from helpers.gguf_files import write_model
from helpers.quantized_folders import FORMATS, quantized_folder
from quire.cli.main import main
from quire.llm import LLM
from quire.loader import GGUFFiles
from quire.loader import gguf_file as gguf
from quire.loader.gguf_writer import OutTensor, write_gguf
from quire.loader.safetensors import SafetensorsFile
from quire.quant.ggml import READ_TYPES
from quire.types import SamplingParams

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("gguf")
    save(tiny_model("llama2"), folder, torch.float32)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c not in "ĠĊ", c))
    return write_model(
        folder, out / "tiny.gguf", "llama",
        **{
            "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": [],
            "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *alphabet[: VOCAB - 3]],
            "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (VOCAB - 3), np.int32),
            "tokenizer.chat_template": CHAT,
        },
    )  # fmt: skip


def with_metadata(path: Path, out: Path, changes: dict[str, object]) -> Path:
    """The same model with other metadata."""
    with GGUFFiles(path) as files:
        tensors = [OutTensor(name, "F32", tensor.shape) for name, tensor in files.tensors.items()]
        values = {
            key: value
            if isinstance(value, int | float | str)
            else value.strings()
            if value.holds_strings
            else value.numbers()
            for key, value in files.metadata.items()
        }
        write_gguf(out, values | changes, tensors, lambda t: [files.read(t.name, 0, t.shape[0])])
    return out


@pytest.mark.parametrize("as_folder", [False, True])
def test_generate(path: Path, as_folder: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(path.parent if as_folder else path)
    assert main(["generate", model, "--prompt", "Hi there", "--max-tokens", "4", "--ignore-eos", "--json", "--quiet",
                 "--temperature", "0"]) == 0  # fmt: skip
    output = json.loads(capsys.readouterr().out)
    assert output["usage"]["prompt_tokens"] == 8
    assert output["usage"]["completion_tokens"] == 4


def test_an_end_token_outside_the_vocabulary_is_left_out(path: Path, tmp_path: Path) -> None:
    out = with_metadata(path, tmp_path / "changed.gguf", {"tokenizer.ggml.eos_token_id": 4000})
    with LLM(out, progress=False) as llm:
        assert "eos_token_id: [4000] is outside the vocabulary of 128 tokens: ignored" in " ".join(
            llm.notices
        )
        assert llm.generate("Hi", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_token_ids_need_no_way_to_cut_words(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = with_metadata(path, tmp_path / "changed.gguf", {"tokenizer.ggml.pre": "no-such"})
    options = ["--max-tokens", "2", "--ignore-eos", "--quiet", "--temperature", "0"]
    assert main(["generate", str(out), "--prompt-token-ids", "5,6", *options]) == 0
    assert len(capsys.readouterr().out) > 1
    assert main(["generate", str(out), "--prompt", "Hi", *options]) == 1
    assert "tokenizer.ggml.pre = 'no-such' is unknown" in capsys.readouterr().err
    assert main(["verify", str(out), "--json"]) == 0


def test_a_header_is_parsed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = gguf.parse_header
    monkeypatch.setattr(
        gguf, "parse_header", lambda data, where: (parsed.append(where), parse(data, where))[1]
    )
    with LLM(path, progress=False) as llm:
        llm.generate(["Hi"], SamplingParams(max_tokens=1), use_tqdm=False)
    assert parsed == [path.name]


def test_inspect_names_formats(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json", "--no-measure"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stored"] == {
        "F32": {"tensors": 21, "bytes": report["stored"]["F32"]["bytes"], "dequantized": 0}
    }
    assert report["tokenizer"] == {
        "kind": "BPE gpt-2",
        "tokens": VOCAB,
        "chat_templates": {"default": len(CHAT)},
        "answers": {part: {"format": None, "found": "none"} for part in ("tool_calls", "reasoning")},
    }
    assert main(["inspect", str(path), "--no-measure"]) == 0
    assert "F32" in capsys.readouterr().out


def test_inspect_reads_headers_only(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number of any weight is read, of GGUF and of plain and quantized safetensors."""
    plain = tmp_path / "plain"
    save(tiny_model("llama2"), plain, torch.float32)
    folders = [quantized_folder(plain, tmp_path / kind, kind)[0] for kind in FORMATS]
    read: list[str] = []
    settings = (
        ".weight_shape",
        ".quant_state.bitsandbytes__nf4",
        ".shape",
        ".nbits",
        ".axis",
        ".quant_scale",
    )
    small = SafetensorsFile.read

    def watched(file: SafetensorsFile, name: str, *rows: Any) -> Any:
        if not name.endswith(settings):  # what they say belongs to the header
            read.append(name)
        return small(file, name, *rows)

    monkeypatch.setattr(SafetensorsFile, "read", watched)
    monkeypatch.setattr(GGUFFiles, "read", lambda _files, name, *_: read.append(name))
    monkeypatch.setattr(GGUFFiles, "read_codes", lambda _files, name, *_: read.append(name))
    for model in (path, plain, *folders):
        assert main(["inspect", str(model), "--no-measure"]) == 0
        assert read == []
    capsys.readouterr()


def quantized(path: Path, out: Path, kind: str) -> Path:
    """The same model with random blocks of a type for its 2-D tensors, and its F32 values in another file."""
    rng = np.random.default_rng(0)
    block = READ_TYPES[kind]
    with GGUFFiles(path) as files:
        tensors, data = [], {}
        for name, tensor in files.tensors.items():
            if len(tensor.shape) == 2 and tensor.shape[1] % block.values == 0:
                blocks = rng.integers(
                    0, 256, (tensor.shape[0] * tensor.shape[1] // block.values, block.nbytes), np.uint8
                )
                blocks[:, :2] = (
                    (rng.standard_normal(len(blocks)) * 0.01).astype("<f2").view(np.uint8).reshape(-1, 2)
                )
                tensors.append(OutTensor(name, kind, tensor.shape))
                data[name] = blocks
            else:
                tensors.append(OutTensor(name, "F32", tensor.shape))
                data[name] = np.array(files.read(name, 0, tensor.shape[0]))
        metadata = {
            key: value.strings() if getattr(value, "holds_strings", False)
            else value.numbers() if hasattr(value, "numbers") else value
            for key, value in files.metadata.items()
        }  # fmt: skip
        write_gguf(out, metadata, tensors, lambda tensor: [data[tensor.name]])
    return out


def test_quantized_weights_run_and_are_announced(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantized(path, tmp_path / "q.gguf", "Q8_0")
    options = ["--prompt", "Hi", "--max-tokens", "2", "--ignore-eos", "--quantization", "none"]
    assert main(["generate", str(made), *options]) == 0
    assert "stored as Q8_0 are dequantized" in capsys.readouterr().err
    assert main(["inspect", str(made), "--no-measure"]) == 0
    assert "Q8_0" in capsys.readouterr().out


def test_types_that_are_not_read_are_named(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantized(path, tmp_path / "q.gguf", "Q8_0")
    data = made.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    made.write_bytes(
        data[:at] + (9).to_bytes(4, "little") + data[at + 4 :]
    )  # Q8_1: larger, so the sizes fail too
    assert main(["generate", str(made), "--prompt", "Hi"]) == 1
    assert "blk.0.attn_q.weight" in capsys.readouterr().err or "overlaps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba' is not supported: implemented are"),
        ({"llama.block_count": 10**6}, "llama.block_count: 1000000 is not in"),
        ({"llama.attention.head_count": "four"}, "head_count: 'four' is not an integer"),
        ({"llama.attention.value_length": 8}, "value_length = 8 is not supported"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_used_count: is missing"),
        ({"llama.rope.scaling.type": "su"}, "rope.scaling.type = 'su' is not supported"),
        ({"llama.vocab_size": 5}, "llama.vocab_size: token_embd.weight has 128 rows"),
        ({"llama.attention.sliding_window": 32}, "sliding_window = 32 is not supported"),
        ({"llama.block_count": 3}, "the checkpoint lacks"),
        ({"llama.block_count": 1}, "tensors that its config does not imply"),
    ],
)  # fmt: skip
def test_metadata_that_is_refused(
    path: Path, tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = with_metadata(path, tmp_path / "changed.gguf", {"tokenizer.ggml.model": "none", **changes})
    assert main(["generate", str(out), "--prompt-token-ids", "5,6"]) == 1
    assert message in capsys.readouterr().err
