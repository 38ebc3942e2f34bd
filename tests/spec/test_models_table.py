"""docs/models.md is what the registry says now, and its sums are the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.models_table import example_config, table

from quire.spec.config_reader import ConfigReader
from quire.spec.describe import attention_kind, kv_elements, mha_elements, ranges
from quire.spec.families import FAMILIES, read_spec

ROOT = Path(__file__).parents[2]


def test_page_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == table(), (
        "run python -m tools.models_table > docs/models.md"
    )


@pytest.mark.parametrize(
    ("model_type", "layers", "heads", "kv_heads", "head_dim", "full"),
    [
        ("llama", 32, 32, 8, 128, 32),
        ("gemma", 18, 8, 1, 256, 18),
        ("gemma2", 42, 16, 8, 256, 21),
        ("gemma3_text", 26, 4, 1, 256, 4),
        ("cohere", 40, 64, 64, 128, 40),
        ("glm", 40, 32, 2, 128, 40),
        ("olmo3", 32, 32, 32, 128, 8),
    ],
)  # fmt: skip
def test_kv_of_released_models(
    model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, full: int
) -> None:
    """2 x layers x kv_heads x head_dim; MHA : GQA : MQA are heads : kv_heads : 1."""
    spec, _ = read_spec(ConfigReader({"model_type": model_type, **example_config(model_type)}))
    assert kv_elements(spec) == 2 * layers * kv_heads * head_dim
    assert mha_elements(spec) * kv_heads == kv_elements(spec) * heads
    assert kv_elements(spec, lambda att: att.window == 0) == 2 * full * kv_heads * head_dim


def test_words() -> None:
    assert [attention_kind(8, n) for n in (8, 4, 2, 1)] == ["MHA", "GQA", "GQA", "MQA"]
    assert attention_kind(1, 1) == "MHA"
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_every_family_is_shown() -> None:
    assert all(f"`{family.model_type}`" in table() for family in FAMILIES)
