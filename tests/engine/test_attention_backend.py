"""--attention-backend: what exists is accepted and pinned, all else refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import quire
from quire.cli.serve import add_arguments
from quire.config.schema import EngineConfig
from quire.executor.torch import ops
from quire.executor.torch.cache import CacheRow
from quire.executor.torch.kv_caches import CacheShape, FloatCache
from quire.program.ops.attention import Attend, HeadShape


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_each_executor_has_one_backend(executor: str) -> None:
    own, other = ("native", "eager") if executor == "native" else ("eager", "native")
    for name in ("auto", own):
        assert EngineConfig(executor=executor, attention_backend=name).execution.attention_backend == name
    with pytest.raises(
        ValueError, match=f"'{other}' is not a backend of the {executor} executor, which has '{own}'"
    ):
        EngineConfig(executor=executor, attention_backend=other)
    with pytest.raises(ValueError, match="attention_backend: 'FLASH_ATTN' is not one of auto, native, eager"):
        EngineConfig(executor=executor, attention_backend="FLASH_ATTN")


def test_the_command_line_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["m", "--attention-backend", "native"]).attention_backend == "native"
    with pytest.raises(SystemExit):
        parser.parse_args(["m", "--attention-backend", "TRITON_ATTN"])
    assert "invalid choice: 'TRITON_ATTN'" in (said := capsys.readouterr().err)
    assert all(name in said for name in ("auto", "native", "eager"))


def test_eager_attention_of_a_row_has_the_same_bits_beside_any_other() -> None:
    """And torch cannot choose another kernel for it: nothing calls its scaled_dot_product_attention."""
    torch.manual_seed(0)
    op = Attend("qkv", "out", HeadShape(4, 2, 16), layer=0, scale=0.25, window=0)
    cache = FloatCache(torch.randn(8, 2 * 16 * 2 * 16).view(torch.uint8), CacheShape(8, 16, 2, 16), "f32")
    qkv, positions = torch.randn(25, 128), torch.cat((torch.arange(20, 37), torch.arange(3, 11)))
    rows = [CacheRow(0, 17, torch.tensor([1, 5, 2])), CacheRow(17, 25, torch.tensor([4, 0, 0]))]
    both, alone = torch.zeros(25, 64), torch.zeros(25, 64)
    ops.attend(op, qkv, None, positions=positions, cache=cache, rows=rows, out=both)
    ops.attend(op, qkv, None, positions=positions, cache=cache, rows=rows[1:], out=alone)
    assert torch.equal(both[17:], alone[17:])
    assert both[:17].abs().max() > 0
    folder = Path(quire.__file__).parent / "executor" / "torch"
    assert not any("scaled_dot_product" in path.read_text() for path in folder.glob("*.py"))
