"""The gate on the bundled model: what it measures, when it stops, and that memory decides nothing but the way."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.config.schema import EngineConfig
from quire.config.shipped import shipped_models
from quire.engine.build.opening import Model, open_model
from quire.loader import Checkpoint
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import TensorInfo
from quire.offline import divergence
from quire.offline.gate import GateError, GateOptions, GateReport, enforce, gate, run_check
from quire.offline.texts import TEXT
from quire.quant.floats import to_float32

ASKED = EngineConfig(threads=1, dtype="float32")
ASK = "<|im_start|>user\nWhat is TTFT?<|im_end|>\n"
CHAT = f"{ASK}<|im_start|>assistant\nTTFT is the time to the first token.<|im_end|>\n"


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("quire-mini")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "chat.txt"
    path.write_text(CHAT * 3)
    return str(path)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Model]:
    """The bundled model with noise of a share of each tensor's size added to its weights."""

    def made(share: float) -> Model:
        folder = tmp_path_factory.mktemp("noisy")
        shutil.copytree(shipped_models()["quire-mini"], folder, dirs_exist_ok=True)
        random = np.random.default_rng(0)
        with Checkpoint(folder) as source:
            values = {name: to_float32(source.read(name), source.info(name).dtype) for name in source.names()}
            values = {
                name: v + np.float32(share * v.std()) * random.standard_normal(v.shape).astype(np.float32)
                for name, v in values.items()
            }
        infos = [TensorInfo(name, "F32", v.shape) for name, v in values.items()]
        write_safetensors(folder / "model.safetensors", infos, lambda info: iter([values[info.name]]))
        return open_model(folder)

    return made


@pytest.fixture(scope="module")
def damaged(noisy: Callable[[float], Model]) -> Model:
    return noisy(0.5)


def _measure(model: Model, candidate: Model, text: str, **options: object) -> GateReport:
    return gate(model, candidate, ASKED, GateOptions(eval_file=text, **options))  # type: ignore[arg-type]


def test_a_model_compared_with_itself_loses_nothing(model: Model, text: str) -> None:
    report = _measure(model, model, text)
    (found,), (known,) = report.compared.divergences, report.compared.texts
    assert (found.kl_mean, found.kl_p99, found.kl_max, found.top1_agreement) == (0, 0, 0, 1)
    assert known.known
    assert found.perplexity == known.perplexity
    enforce(report, GateOptions())


def test_a_damaged_model_is_stopped_unless_forced(model: Model, damaged: Model, text: str) -> None:
    report = _measure(model, damaged, text)
    (found,) = report.compared.divergences
    assert found.kl_mean > 0.1
    assert found.kl_mean < found.kl_p99 <= found.kl_max
    assert not report.passed
    with pytest.raises(GateError, match=r"mean KL divergence .* above the limit of 0\.1"):
        enforce(report, GateOptions())
    enforce(report, GateOptions(force=True))
    assert _measure(model, damaged, text, max_kl=1e3).passed
    assert json.loads(json.dumps(report.to_json()))["compared"]["divergences"][0]["kl_p99"] == found.kl_p99
    assert "too much" in report.lines()[-1]


def test_a_cache_in_fewer_bits_is_a_candidate(model: Model, text: str) -> None:
    report = gate(
        model, model, ASKED, GateOptions(eval_file=text), changed=ASKED.replace(kv_cache_dtype="int8")
    )
    assert (report.original.kv, report.candidate.kv) == ("f32", "i8")
    assert 3 * report.candidate.kv_bytes_per_token < report.original.kv_bytes_per_token
    assert 0 < report.compared.divergences[0].kl_mean < 0.1
    assert report.passed


def test_one_model_after_the_other_gives_the_same_numbers(
    model: Model, damaged: Model, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bound does not hold both, the original's predictions wait in a file."""
    expected = _measure(model, damaged, text)
    kept = []
    keep = divergence.Predictions.keep

    def counted(self: divergence.Predictions) -> None:
        kept.append(self)
        keep(self)

    monkeypatch.setattr(divergence.Predictions, "keep", counted)
    monkeypatch.setattr("quire.offline.quality.side_by_side", lambda *_: False)
    assert _measure(model, damaged, text) == expected
    assert kept


def test_a_text_that_the_model_does_not_know_proves_nothing(model: Model, tmp_path: Path) -> None:
    text = tmp_path / "prose.txt"
    text.write_text(TEXT[:800])
    report = _measure(model, model, str(text))
    assert not report.compared.texts[0].known
    assert "knows none of the texts" in report.problems[0]


def test_a_check_of_the_users_own_decides_too(
    model: Model, damaged: Model, text: str, tmp_path: Path
) -> None:
    """It runs on both, sees which model it is to check, and its last number counts."""
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys\n"
        "assert os.environ['QUIRE_MODEL'] == sys.argv[1]\n"
        "print('7 questions')\n"
        "print('score', 0.5 if 'quire-mini' in sys.argv[1] else sys.argv[2])\n"
    )
    same, worse = (f"{sys.executable} {script} {{model}} {score}" for score in (0.495, 0.4))
    report = _measure(model, damaged, text, eval_cmd=same, max_kl=1e3)
    assert report.check is not None
    assert (report.check.original, report.check.candidate) == (0.5, 0.495)
    assert report.passed
    report = _measure(model, damaged, text, eval_cmd=worse, max_kl=1e3)
    assert "20.0% for the worse" in report.problems[0]
    assert _measure(model, damaged, text, eval_cmd=worse, max_kl=1e3, better="lower").passed
    with pytest.raises(GateError, match="failed with status 3"):
        run_check("exit 3", model, "auto")
    with pytest.raises(GateError, match="has no number: 'done'"):
        run_check("echo 5; echo done", model, "auto")


def test_models_that_cannot_be_compared(model: Model, text: str, tmp_path: Path) -> None:
    """Another tokenizer, a text of one token, an impossible limit."""
    folder = tmp_path / "other"
    shutil.copytree(model.folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="against: other has another tokenizer than quire-mini"):
        _measure(model, open_model(folder), text)
    short = tmp_path / "short.txt"
    short.write_text("a")
    with pytest.raises(ValueError, match="has 1 tokens; at least 2"):
        _measure(model, model, str(short))
    with pytest.raises(ValueError, match="max_kl: -1"):
        GateOptions(max_kl=-1)
