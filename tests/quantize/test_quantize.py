"""`quantize` on tiny models: what it writes loads, an interrupted run continues, and errors leave nothing behind."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.tokenizers import save_whole
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import open_weights
from quire.engine.build.opening import open_model
from quire.offline.quantize import unfinished as work_module
from quire.offline.quantize.quantize_model import quantize
from quire.offline.quantize.recipe import Recipe
from quire.spec.scheme import scheme
from quire.types import CheckpointError, MemoryBudgetError, QuireError, UnsupportedModelError

ASKED = EngineConfig().replace(threads=1)
MODEL = "llama-biases-mqa-tied"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("llama2", tmp_path_factory.mktemp("quantize") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).choice(
        ["one", "word", "after", "another;", "42", "(and)", "so on.\n"], 400
    )
    path.write_text(" ".join(words))
    return str(path)


def recipe(method: str, **more: Any) -> Recipe:
    options: dict[str, Any] = {"samples": 6, "length": 32}
    if method in {"smoothquant", "fp8"}:
        options["bits"] = 8
    elif method != "gguf":
        options["group_size"] = 32
    return Recipe(method=method, **(options | more))  # type: ignore[arg-type]


CASES = [
    recipe("rtn"), recipe("gptq"), recipe("gptq", bits=3), recipe("gptq", bits=2, group_size=0), recipe("gptq", bits=8),
    recipe("gptq", symmetric=False, desc_act=False), recipe("awq"), recipe("awq", bits=3), recipe("awq-gptq"),
    recipe("smoothquant"), recipe("fp8"), recipe("fp8", activations="static"), recipe("gguf", gguf_type="Q4_0"),
    recipe("gguf", target_bits=5.0), recipe("gptq", target_bits=5.5), recipe("awq", target_bits=4.0),
    recipe("rtn", target_bits=3.5, bits=2),
]  # fmt: skip


def named(each: Recipe) -> str:
    return " ".join(
        str(value) for key, value in each.described().items() if key not in {"samples", "length", "seed"}
    )


@pytest.mark.parametrize("how", CASES, ids=named)
def test_what_is_written_loads(how: Recipe, model: Path, text: str, tmp_path: Path) -> None:
    """The numbers that Quire reads are near the original's, in the format that the method says."""
    out = tmp_path / ("out.gguf" if how.method == "gguf" else "out")
    result = quantize(str(model), out, how, ASKED, calibration=text)
    assert list(tmp_path.iterdir()) == [out]
    original = load_file(model / "model.safetensors")
    found = open_model(out)
    bits = {2: 0.8, 3: 0.4, 4: 0.2, 8: 0.04}[how.bits]
    moved = 1.2 if how.method == "gptq" else 1  # weights that make up for others are further away
    with open_weights(found) as source:
        for name, weight in original.items():
            if not name.endswith("proj.weight") or how.method in {"awq", "awq-gptq", "smoothquant"}:
                continue  # whose columns are scaled
            values = np.asarray(source.read(name), np.float32)
            if how.method == "gguf" and name.endswith(("q_proj.weight", "k_proj.weight")):
                values = values.reshape(weight.shape)
            far = np.sqrt(np.square(values - weight).sum() / np.square(weight).sum())
            assert far < (0.2 if how.method == "gguf" else bits * moved), name
    if how.method != "gguf":
        meta = json.loads((out / "config.json").read_text())["quantization_config"]["meta"]
        assert meta["method"] == how.method
        assert ("calibration_sha256" in meta) == how.needs_text
        assert len(result.errors) == 14
        assert max(result.errors.values()) < bits


def test_a_prompt_gives_nearly_the_same_logits(model: Path, text: str, tmp_path: Path) -> None:
    """AWQ and SmoothQuant also change norms and other weights: together they are the same model."""
    from quire.offline.gate import GateOptions, gate

    for how, most in (
        (recipe("awq"), 0.1),
        (recipe("awq-gptq"), 0.1),
        (recipe("smoothquant"), 0.01),
        (recipe("gptq", bits=8), 0.01),
    ):
        quantize(str(model), tmp_path / how.method, how, ASKED, calibration=text)
        report = gate(
            open_model(model),
            open_model(tmp_path / how.method),
            ASKED,
            GateOptions(eval_file=text, force=True),
        )
        assert report.compared.divergences[0].kl_mean < most


class Stop(BaseException):
    """Ends a run as a signal would."""


def stopping(at: int) -> Callable[[int, int], None]:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        assert done <= total
        if calls == at:
            raise Stop

    return progress


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("mixed", 3),
        ("mixed", 8),
        ("mixed", 20),
        ("gptq", 1),
        ("gptq", 13),
        ("gptq", 40),
        ("awq", 9),
        ("rtn", 2),
        ("gguf", 8),
    ],
)
def test_an_interrupted_run_continues_to_the_same_bytes(
    method: str, at: int, model: Path, text: str, tmp_path: Path
) -> None:
    suffix = ".gguf" if method == "gguf" else ""
    out, whole = tmp_path / f"out{suffix}", tmp_path / f"whole{suffix}"
    more: dict[str, Any] = {"gguf": {"gguf_type": "Q5_0"}, "mixed": {"target_bits": 5.5}}.get(method, {})
    how = recipe("gptq" if method == "mixed" else method, **more)
    quantize(str(model), whole, how, ASKED, calibration=text)
    with pytest.raises(Stop):
        quantize(str(model), out, how, ASKED, calibration=text, progress=stopping(at))
    assert not out.exists()
    steps: list[int] = []
    quantize(str(model), out, how, ASKED, calibration=text, progress=lambda done, _: steps.append(done))
    first = {"mixed": 6, "gptq": 24, "awq": 6, "rtn": 1, "gguf": 6}[method]  # passes of a layer
    if method == "mixed" and at > 12:  # widths of both layers are measured
        assert steps[0] == 13
    else:
        assert steps[0] == (first + 1 if at > first else 1)
    files = [whole] if suffix else sorted(whole.iterdir())
    for path in files:
        assert (out if suffix else out / path.name).read_bytes() == path.read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted([out, whole])


@pytest.mark.parametrize(("target", "widths"), [(5.5, {4, 8}), (3.2, {2, 3, 4, 8})])
def test_bits_go_where_they_save_most(
    target: float, widths: set[int], model: Path, text: str, tmp_path: Path
) -> None:
    """The mean is the target at most; one input, one width; a pattern of `dynamic` for each module that differs."""
    quantize(str(model), tmp_path / "out", recipe("gptq", target_bits=target), ASKED, calibration=text)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quant, found = config["quantization_config"], dict[str, int]()
    stored = bits = 0
    with open_weights(open_model(tmp_path / "out")) as source:
        parts, names = source.stored_parts()  # type: ignore[attr-defined]
        stored = sum(parts.info(name).nbytes for name in names if not name.endswith("g_idx"))
        numbers = sum(
            int(np.prod(source.info(name).shape)) for name in source.names() if source.info(name).stored
        )
        for name in source.names():
            if source.info(name).stored:
                found[name.removesuffix(".weight")] = int(source.info(name).stored.split("-bit")[0][-1])  # type: ignore[union-attr]
    assert target - 1 < 8 * stored / numbers <= target
    assert len(set(found.values())) > 1
    assert set(found.values()) <= widths
    for name, bits in found.items():
        matches = [
            each["bits"] for key, each in quant["dynamic"].items() if re.match(key.removeprefix("+:"), name)
        ]
        assert matches == ([bits] if bits != quant["bits"] else [])
        query = found[re.sub("[kv]_proj$", "q_proj", re.sub("up_proj$", "gate_proj", name))]
        assert bits == query
        fused = re.sub("q_proj$", "qkv_proj", re.sub("gate_proj$", "gate_up_proj", name))
        assert bits == quant["bits"] or any(re.match(key[2:], fused) for key in quant["dynamic"])
    assert scheme(config) == f"W{'/'.join(map(str, sorted({*found.values()})))}A16 g32 sym"


def test_a_run_that_is_killed_while_it_writes(
    model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file that a run writes: before it has its name."""
    how = recipe("rtn")
    quantize(str(model), tmp_path / "whole", how, ASKED)
    real = Path.replace
    for at in range(1, 6):
        calls = 0

        def replace(self: Path, target: Path, at: int = at) -> Path:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Stop
            return real(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            with pytest.raises(Stop):
                quantize(str(model), tmp_path / f"out{at}", how, ASKED)
        quantize(str(model), tmp_path / f"out{at}", how, ASKED)
        for path in (tmp_path / "whole").iterdir():
            assert (tmp_path / f"out{at}" / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk(model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = work_module.write_safetensors, 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(work_module, "write_safetensors", full)
    with pytest.raises(CheckpointError, match="disk is full; finished layers stay there"):
        quantize(str(model), tmp_path / "out", recipe("gptq"), ASKED, calibration=text)
    assert not (tmp_path / "out").exists()
    calls = 2
    with pytest.raises(CheckpointError, match="is of another run"):
        quantize(str(model), tmp_path / "out", recipe("gptq", bits=8), ASKED, calibration=text)
    quantize(str(model), tmp_path / "out", recipe("gptq"), ASKED, calibration=text)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def short(tmp: Path) -> str:
    (tmp / "short.txt").write_text("a few words")
    return str(tmp / "short.txt")


@pytest.mark.parametrize(
    ("asked", "how", "error", "message"),
    [
        ({"memory": 2**20}, {}, MemoryBudgetError, "a layer with its inputs and their Gram matrices needs"),
        ({}, {"length": 64}, ValueError, "fewer than a window of 64: use a longer text"),
        (
            {},
            {"group_size": 48},
            ValueError,
            "group_size: 48 does not divide the 64 input features of .*; 64, 32, 16",
        ),
        ({}, {"bits": 5}, ValueError, "bits: 5 is not one of 2, 3, 4, 8"),
        ({}, {"damping": 0.0}, ValueError, "damping: 0.0 is not above 0"),
    ],
)
def test_errors_come_first_and_leave_nothing(
    asked: dict[str, Any], how: dict[str, Any], error: type[Exception], message: str, model: Path, text: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    name = short(tmp_path) if "length" in how else text
    with pytest.raises(error, match=message):
        quantize(str(model), out, recipe("gptq", **how), ASKED.replace(**asked), calibration=name)
    assert not [path for path in tmp_path.iterdir() if path.name != "short.txt"]


def test_models_that_are_not_quantized(model: Path, text: str, tmp_path: Path) -> None:
    quantize(str(model), tmp_path / "done", recipe("rtn"), ASKED)
    with pytest.raises(CheckpointError, match=r"already quantized \(GPTQ\)"):
        quantize(str(tmp_path / "done"), tmp_path / "out", recipe("rtn"), ASKED)
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(str(model), tmp_path / "done", recipe("rtn"), ASKED)
    with pytest.raises(CheckpointError, match=r"ends in \.gguf"):
        quantize(str(model), tmp_path / "out", recipe("gguf", bits=8), ASKED, calibration=text)
    stacked = save_whole("qwen3-moe", tmp_path / "stacked")
    names = load_file(stacked / "model.safetensors")
    if any(name.endswith("experts.gate_up_proj") for name in names):
        with pytest.raises(UnsupportedModelError, match="experts that are stored in one tensor"):
            quantize(str(stacked), tmp_path / "out", recipe("rtn", group_size=8), ASKED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mixtral", "deepseek2-lite"])
def test_experts_and_latent_attention(name: str, text: str, tmp_path: Path) -> None:
    folder = save_whole(name, tmp_path / "model")
    result = quantize(str(folder), tmp_path / "out", recipe("gptq", group_size=8), ASKED, calibration=text)
    with open_weights(open_model(tmp_path / "out")) as source:
        original = load_file(folder / "model.safetensors")
        for module in result.errors:
            values, weight = np.asarray(source.read(f"{module}.weight")), original[f"{module}.weight"]
            assert np.square(values - weight).sum() < 0.12 * np.square(weight).sum()
    if name == "deepseek2-lite":
        assert "rounded to nearest" in result.lines[-1]


def test_the_gate_holds_a_result_back(
    model: Path, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(model), "--out", str(out), "--method", "rtn", "--bits", "2", "--group-size", "32",
               "--threads", "1", "--eval", text, "--max-kl", "0.000001"]  # fmt: skip
    status = main(command)
    said = capfd.readouterr().err
    assert status == 1
    assert "mean KL divergence" in said or "knows none of the texts" in said
    assert not out.exists()
    assert main([*command, "--force", "--quiet"]) == 0
    assert out.is_dir()
    assert not issubclass(QuireError, ValueError)
