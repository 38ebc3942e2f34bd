"""How far logits are from those of transformers in float32, by family, number format and scheme; and the page of it.

PYTHONPATH=src:tests:. python -m helpers.tolerances      measures all and writes the table of docs/tolerances.md

The number is the root mean square of the differences over the standard deviation of the logits. Weights of quantized
schemes are taken as they are stored: the number is what computing with them adds, not what rounding them costs.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import save_file
from tools.marked_tables import replaced

from helpers.checkpoints import LENGTH, TINY_MODELS, TinyModel, random_tokens, reference_logits, save
from helpers.quantized_folders import LINEAR, quantized_folder, tensors
from quire.config.schema import EngineConfig
from quire.engine.build.opening import open_model
from quire.loader import Checkpoint
from quire.offline.scorer import CHUNK, Scorer
from quire.types import QuireError

PAGE = Path(__file__).parents[2] / "docs" / "tolerances.md"
SLACK, STALE = (
    2.0,
    40.0,
)  # a published limit is that many times what was measured, and at most that many times
NONE = "–"
Logits = npt.NDArray[np.float32]
# Columns of a plain checkpoint: options of the engine.
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
}
# Columns of quantized checkpoints: the scheme and its format in helpers.quantized_folders.
SCHEMES = {
    "W4A16 GPTQ": "gptq", "W3A16 GPTQ": "gptq-3-bits", "W2A16 GPTQ": "gptq-2-bits", "W4A16 AWQ": "awq",
    "W8A8": "int-quantized", "W8A8-FP8": "float-quantized", "W4A16-MXFP4": "mxfp4-pack-quantized",
}  # fmt: skip
COLUMNS = (*FORMATS, *SCHEMES)


def one_of_each_family() -> list[TinyModel]:
    """The first tiny model of every config class."""
    return list({model.config_class: model for model in reversed(TINY_MODELS)}.values())[::-1]


def measured(plain: Path, column: str, reference: Logits, folder: Path) -> float | None:
    """The number of one cell; None where the family or its tensors have no such format.

    `reference`: logits of random_tokens(0) of the plain checkpoint. `folder` takes other checkpoints.
    """
    try:
        if column in FORMATS:
            return _distance(logits(plain, FORMATS[column]), reference)
        if not _fits(plain):
            return None
        made, values = quantized_folder(plain, folder / "quantized", SCHEMES[column])
        (folder / "floats").mkdir()
        (folder / "floats" / "config.json").write_text((plain / "config.json").read_text())
        for name in values:
            if LINEAR.fullmatch(name.removesuffix(".bias")) and column.endswith("GPTQ"):
                values[name] = np.zeros_like(
                    values[name]
                )  # GPTQ's own biases, which quantized_folder has as zeros
        save_file(tensors(dict(values)), folder / "floats" / "model.safetensors")
        expected = logits(folder / "floats", FORMATS["float32"])
        return _distance(logits(made, {"dtype": "float32"}), expected)
    except QuireError:
        return None


def _fits(plain: Path) -> bool:
    """Whether all linears are whole groups of 32 and whole words of 8 codes."""
    with Checkpoint(plain) as checkpoint:
        shapes = [checkpoint.info(name).shape for name in checkpoint.names()
                  if LINEAR.fullmatch(name.removesuffix(".weight"))]  # fmt: skip
    return bool(shapes) and all(len(s) == 2 and s[0] % 8 == 0 and s[1] % 32 == 0 for s in shapes)


def logits(folder: Path, options: dict[str, str]) -> Logits:
    """Of random_tokens(0), in chunks."""
    scorer = Scorer(open_model(folder), EngineConfig(threads=1, **options), LENGTH)
    scorer.load(None)
    tokens = random_tokens(0)
    found = [scorer.logits(tokens, start).copy() for start in range(0, LENGTH, CHUNK)]
    scorer.close()
    return np.concatenate(found)


def _distance(found: Logits, expected: Logits) -> float:
    return float(np.sqrt(np.square(found - expected, dtype=np.float64).mean()) / expected.std())


def published() -> dict[str, dict[str, float | None]]:
    """The limits of the page: family -> column -> number."""
    rows = re.findall(r"^\| `(\S+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    found = {}
    for family, cells in rows:
        texts = [cell.strip() for cell in cells.split("|")]
        found[family] = {
            column: None if text == NONE else float(text) for column, text in zip(COLUMNS, texts, strict=True)
        }
    return found


def _limit(value: float | None) -> str:
    """Twice the number, rounded up to one digit."""
    if value is None:
        return NONE
    wide = max(SLACK * value, 1e-7)
    power = 10.0 ** math.floor(math.log10(wide))
    return f"{math.ceil(wide / power - 1e-9) * power:.0e}".replace("e-0", "e-").replace("e+00", "")


def main() -> None:
    lines = [f"| family | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}\n"]
    for model in one_of_each_family():
        cells = []
        with tempfile.TemporaryDirectory() as name:
            plain = Path(name) / "plain"
            reference = reference_logits(save(model, plain), random_tokens(0))
            for number, column in enumerate(COLUMNS):
                (other := Path(name) / str(number)).mkdir()
                cells.append(_limit(measured(plain, column, reference, other)))
        lines.append(f"| `{model.name}` | {' | '.join(cells)} |\n")
        print(lines[-1], end="", flush=True)
    PAGE.write_text(replaced(PAGE.read_text(), "tolerances", "".join(lines)))


if __name__ == "__main__":
    main()
