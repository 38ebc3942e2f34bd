"""A kvquant3 cache: levels found on a text, read as they were written, checked before anything runs, used by layers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.loader.kv_codes import code_name, read_codes_file, write_codes
from quire.offline.kv_levels import LayerSample, weighted_levels
from quire.program.formats import HeadCodes
from quire.program.ops.attention import HeadShape
from quire.spec import Rope
from quire.spec.rope import cos_sin
from quire.types import CheckpointError, UnsupportedModelError

SHORT = {"progress": False, "max_model_len": 64, "threads": 1, "num_kv_blocks": 16}
ASK = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, ignore_eos=True)
LEVELS = ((-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0),) * 2
CODES = dict.fromkeys((0, 3), replace(HeadCodes.even(2, 16), key_levels=LEVELS, value_levels=LEVELS))
HEADS = {0: (2, 16), 3: (2, 16)}


def answer(folder: Path, **options: object) -> list[float]:
    with LLM(folder, **(SHORT | options)) as llm:  # type: ignore[arg-type]
        (sample,) = llm.generate([[5, 6, 7, 8, 9]], ASK)[0].outputs
        return [c.logprob for position in sample.logprobs or [] for c in position]


def test_levels_are_the_best_of_k_means() -> None:
    """Numbers at eight places, of any weight: the places; a heavy cluster draws levels to it."""
    random = np.random.default_rng(0)
    places = np.sort(random.standard_normal(8)).astype(np.float32)
    y = np.repeat(places, 50)
    np.testing.assert_allclose(weighted_levels(y, random.random(400) + 0.1), places, rtol=1e-6)
    y = random.standard_normal(20_000).astype(np.float32)
    plain, heavy = (weighted_levels(y, np.where(y > 1, weight, 1.0)) for weight in (1.0, 100.0))
    assert (np.diff(plain) > 0).all()
    assert (heavy > 1).sum() > (plain > 1).sum()
    errors = [
        np.square(y[:, None] - levels).min(1).mean()
        for levels in (plain, np.linspace(-3, 3, 8, dtype=np.float32))
    ]
    assert errors[0] == pytest.approx(0.0345, rel=0.05)  # Lloyd and Max: eight levels of a normal number
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("rope", [Rope(1e4, 16), Rope(1e4, 12, interleaved=True), None])
def test_keys_are_seen_before_their_rotation(rope: Rope | None) -> None:
    """Ranges of dimensions are those of keys that were never rotated."""
    random, shape = np.random.default_rng(1), HeadShape(4, 2, 16)
    wide = np.exp(random.standard_normal((2, 16)))
    rows = random.standard_normal((200, 8, 16)).astype(np.float32)
    rows[:, 4:6] = rows[:, 4:6] * wide + 3 * wide
    plain, turned = (LayerSample(shape, each, 200, 200) for each in (None, rope))
    plain.take(rows.reshape(200, -1), 0)
    given = rows.copy()
    if rope is not None:
        cos, sin = (table[:, None] for table in cos_sin(rope, 200))
        half = rope.dim // 2
        low, high = (
            (np.s_[..., 0 : rope.dim : 2], np.s_[..., 1 : rope.dim : 2])
            if rope.interleaved
            else (np.s_[..., :half], np.s_[..., half : rope.dim])
        )
        given[low], given[high] = rows[low] * cos - rows[high] * sin, rows[high] * cos + rows[low] * sin
    for start in (0, 64, 150):
        turned.take(given[start : {0: 64, 64: 150, 150: 200}[start]].reshape(-1, 128), start)
    expected, found = plain.codes(), turned.codes()
    np.testing.assert_allclose(found.middles, expected.middles, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-3)


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_codes(tmp_path / "codes", CODES)
    assert read_codes_file(tmp_path / "codes", HEADS) == CODES


@pytest.mark.parametrize(
    ("changed", "heads", "told"),
    [
        ({"scales": ((0.0,) * 16,) * 2}, HEADS, f"{code_name(0, 'key_scales')}: a scale is not above 0"),
        ({"middles": ((np.nan,) * 16,) * 2}, HEADS, f"{code_name(0, 'key_middles')}: contains NaN"),
        ({"value_levels": ((1.0, 0.0) * 4,) * 2}, HEADS, f"{code_name(0, 'value_levels')}: levels must rise"),
        ({}, {0: (2, 16), 1: (2, 16)}, f"{code_name(1, 'key_levels')} is missing"),
        ({}, {0: (4, 16)}, r"F32 \[2, 8\], but this model needs F32 \[4, 8\]"),
    ],
)
def test_bad_files_are_refused_by_name(
    changed: dict[str, tuple[tuple[float, ...], ...]],
    heads: dict[int, tuple[int, int]],
    told: str,
    tmp_path: Path,
) -> None:
    assert {field.name for field in fields(HeadCodes)} > changed.keys()
    write_codes(tmp_path / "codes", {layer: replace(each, **changed) for layer, each in CODES.items()})
    with pytest.raises(CheckpointError, match=told):
        read_codes_file(tmp_path / "codes", heads)


def test_calibrated_levels_are_used(
    checkpoint: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers are near those of a float32 cache, nearer than with even levels; no file, no cache."""
    folder, out, text = checkpoint("qwen3"), tmp_path / "levels.safetensors", tmp_path / "text"
    text.write_text("the cat sat on the mat and the dog sat on the log " * 30)
    asked = ["--kv-cache-dtype", "kvquant3", "--quiet"]
    assert main(["calibrate", str(folder), "--out", str(out), "--text", str(text), *asked]) == 0
    assert "levels of 2 layers" in capsys.readouterr().err
    exact = answer(folder)
    found = answer(folder, kv_cache_dtype="kvquant3", kv_cache_scales=str(out))
    assert np.abs(np.subtract(found, exact)).mean() < 0.2
    assert found != exact
    with pytest.raises(ValueError, match="kvquant3 needs kv_cache_scales, a file that `quire calibrate"):
        answer(folder, kv_cache_dtype="kvquant3")


def test_latents_have_no_such_cache(checkpoint: Folder) -> None:
    with pytest.raises(UnsupportedModelError, match="kvquant3 is not supported with latent attention"):
        answer(checkpoint("deepseek3"), kv_cache_dtype="kvquant3")
