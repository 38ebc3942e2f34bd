"""quire prune on the bundled model: the gate stops, force continues, and what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, SamplingParams, _native
from quire.cli.main import main
from quire.engine.build.sparse_formats import FASTER_ISA
from quire.loader import Checkpoint
from quire.outputs import CompletionOutput
from quire.quant.floats import to_float32
from quire.types import CheckpointError

ASK = "<|im_start|>user\nWhat is TTFT?<|im_end|>\n"
CHAT = f"{ASK}<|im_start|>assistant\nTTFT is the time to the first token.<|im_end|>\n"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(["prune", "quire-mini", "--threads", "1", *args])
    return code, capsys.readouterr().err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "chat.txt"
    path.write_text(CHAT * 3)
    return str(path)


def test_the_gate_stops_and_force_continues(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "half"
    words = ("--out", str(out), "--method", "magnitude", "--pattern", "2:4", "--eval", text)
    code, err = run(capsys, *words)
    assert code == 1
    assert re.search(r"quality: the mean KL divergence on .* above the limit of 0\.1", err)
    assert "same top-1" in err
    assert not out.exists()
    code, err = run(capsys, *words, "--force")
    assert code == 0
    assert "no speed-up here" in err
    with Checkpoint(out) as made:
        for name in made.names():
            weight = to_float32(made.read(name), made.info(name).dtype)
            if "_proj.weight" in name:
                assert ((weight.reshape(-1, 4) != 0).sum(1) <= 2).all()
            elif weight.ndim > 1:
                assert np.count_nonzero(weight) > 0.9 * weight.size
    assert json.loads((out / "config.json").read_text())["quire_pruning"]["pattern"] == "2:4"
    assert main(["inspect", str(out), "--no-measure"]) == 0
    assert "scheme: W16A16, 50% sparse 2:4 (magnitude)" in capsys.readouterr().out


def test_a_little_passes(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--method",
        "wanda",
        "--sparsity",
        "0.05",
        "--calibration-samples",
        "2",
        "--calibration-length",
        "64",
    )
    code, err = run(capsys, "--out", str(tmp_path / "out"), *words, "--eval", text)
    assert (code, "too much" in err) == (0, False)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("--sparsity", "1"), r"sparsity: 1\.0 is not between 0 and 1"),
        (("--sparsity", "0.3", "--pattern", "2:4"), r"sparsity: the pattern 2:4 has 0\.5, not 0\.3"),
        (("--pattern", "3:2"), "pattern: '3:2' is not N:M"),
        (("--structure", "heads", "--pattern", "2:4"), "structure: takes whole parts out"),
        (("--structure", "heads", "--memory", "40MiB"), "memory: .* the bound is 40.00 MiB"),
        (("--eval", str(tmp_path / "none.txt")), "text: .*none.txt: No such file"),
        (("--calibration", str(tmp_path / "none.txt")), "calibration: .*none.txt: No such file"),
        (("--max-kl", "nan"), "max_kl: nan"),
    ):
        code, err = run(capsys, "--out", str(tmp_path / "out"), *words)
        assert code in {1, 2}
        assert re.search(message, err), err
        assert not list(tmp_path.iterdir())


@pytest.fixture
def halved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "half"
    assert run(capsys, "--out", str(out), "--pattern", "2:4", "--method", "magnitude", "--no-eval")[0] == 0
    return out


def fill(folder: Path, tensor: str, row: int) -> None:
    """Write ones into a row of a bfloat16 tensor."""
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        if tensor in header:
            width = 2 * header[tensor]["shape"][1]
            at = 8 + size + header[tensor]["data_offsets"][0] + row * width
            data[at : at + width] = b"\x80\x3f" * (width // 2)
            file.write_bytes(data)


def answer(folder: Path) -> CompletionOutput:
    with LLM(folder, memory="1GiB", threads=1, dtype="bfloat16") as llm:
        [found] = llm.generate([ASK * 9], SamplingParams(temperature=0, max_tokens=12, logprobs=3))
        return found.outputs[0]


def computed(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    """The scheme that is computed, and the bytes of the feed-forwards."""
    assert main(["inspect", str(folder), "--no-measure", "--json", "--dtype", "bfloat16"]) == 0
    scheme = json.loads(capsys.readouterr().out)["scheme"]
    return scheme["computed"], next(row["memory"] for row in scheme["parts"] if row["part"] == "feed-forward")


@pytest.mark.skipif(
    _native.supported_isas()[0] != FASTER_ISA, reason="2:4 stays dense where that is no slower"
)
def test_two_of_four_are_held_without_the_zeros(halved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens and logprobs as with the zeros, in 9/16 of the bytes."""
    found, (scheme, size) = answer(halved), computed(halved, capsys)
    config = json.loads((halved / "config.json").read_text())
    del config["quire_pruning"]
    (halved / "config.json").write_text(json.dumps(config))
    dense = answer(halved)
    assert (found.token_ids, found.logprobs) == (dense.token_ids, dense.logprobs)
    assert (scheme, "W16A16") == ("W16A16 2:4", computed(halved, capsys)[0])
    assert size == computed(halved, capsys)[1] * 9 // 16


@pytest.mark.skipif(
    _native.supported_isas()[0] != FASTER_ISA, reason="2:4 stays dense where that is no slower"
)
def test_zeros_that_were_filled_since(halved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor whose first rows show it is dense; other rows are refused by name."""
    whole = computed(halved, capsys)[1]
    fill(halved, "model.layers.0.mlp.down_proj.weight", 3)
    assert answer(halved).token_ids
    assert computed(halved, capsys)[1] > whole
    fill(halved, "model.layers.1.mlp.down_proj.weight", 200)
    with pytest.raises(
        CheckpointError,
        match=r"layers\.1\.mlp\.down_proj\.weight: element \[200, 2\] is the third of four neighbours",
    ):
        answer(halved)
