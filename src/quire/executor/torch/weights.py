"""Parameters as torch tensors, filled part by part from a checkpoint."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.program.formats import CODE_BITS, GROUP_BITS
from quire.program.program import Program
from quire.program.tensors import Param
from quire.quant import GroupCodes, check_codes, dequantize, quantize
from quire.quant.groups import TINY, input_share, weight_share

# A quantized parameter or buffer is held as the float32 numbers it stands for.
TORCH_DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "bf16_24": torch.bfloat16, "f16": torch.float16, "i32": torch.int32,
    **dict.fromkeys(CODE_BITS, torch.float32),
}  # fmt: skip
_SOURCES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}


class Weights:
    """A program's parameters in their natural layout: [rows, cols], or [rows] for vectors.

    Those that it borrows are `lender`'s.
    """

    def __init__(self, program: Program, device: torch.device, lender: Weights | None = None) -> None:
        self._tensors = {
            p.name: torch.empty(_shape(p), dtype=TORCH_DTYPES[p.dtype], device=device) for p in program.params
        }
        self._borrowed = {p.name: lender[p.name] for p in program.borrowed} if lender else {}
        self._experts = {p.name: p.experts for p in program.params}
        self._filled = {p.name: np.zeros(p.rows, np.bool_) for p in program.params}

    def __getitem__(self, name: str) -> Tensor:
        found = self._tensors.get(name)
        return self._borrowed[name] if found is None else found

    def get(self, name: str | None) -> Tensor | None:
        """The parameter of that name; None for an optional one that is not there."""
        return None if name is None else self[name]

    def of_experts(self, name: str) -> Tensor:
        """A parameter of experts as [experts, rows, cols], or [experts, rows] for vectors."""
        return self._tensors[name].unflatten(0, (self._experts[name], -1))

    def put(self, param: Param, row_offset: int, data: np.ndarray, dtype: str) -> None:
        """Fill rows from row_offset, rounded to the parameter's dtype; ValueError on a misfit or a repeat."""
        where = f"{param.name}[{row_offset}:{row_offset + len(data)}]"
        if param.name not in self._tensors:
            raise ValueError(f"{param.name} is no parameter of the program")
        if dtype not in _SOURCES or data.dtype != _SOURCES[dtype]:
            raise ValueError(
                f"{where}: {dtype!r} stored as {data.dtype} is not one of F32, F16, BF16 (as uint16)"
            )
        self._take(param, row_offset, data.shape)
        source = torch.from_numpy(data if data.flags.writeable else data.copy())
        source = source.view(torch.bfloat16) if dtype == "BF16" else source
        self._tensors[param.name][row_offset : row_offset + len(data)] = rounded(param, source)

    def put_codes(self, param: Param, row_offset: int, given: GroupCodes) -> None:
        """Fill rows of a weight in groups with what its codes stand for; see Loadable.put_codes."""
        check_codes(param, row_offset, given)
        assert param.groups is not None
        self._take(param, row_offset, given.codes.shape)
        values = dequantize(param.groups, param.code_bits, given)
        self._tensors[param.name][row_offset : row_offset + len(values)] = torch.from_numpy(values)

    def _take(self, param: Param, row_offset: int, shape: tuple[int, ...]) -> None:
        """Mark these rows as filled. Raises ValueError if they don't fit or were filled before."""
        where = f"{param.name}[{row_offset}:{row_offset + shape[0]}]"
        if shape[1:] != _shape(param)[1:] or row_offset < 0 or row_offset + shape[0] > param.rows:
            raise ValueError(f"{where}: shape {shape} does not fit in {_shape(param)}")
        rows = slice(row_offset, row_offset + shape[0])
        if self._filled[param.name][rows].any():
            raise ValueError(f"{where}: was put before")
        self._filled[param.name][rows] = True

    def check_complete(self) -> None:
        """Raise ValueError naming the parameters that still lack rows."""
        missing = [name for name, filled in self._filled.items() if not filled.all()]
        if missing:
            raise ValueError(f"parameters not put whole: {', '.join(missing[:5])} ({len(missing)} in all)")

    def clear(self) -> None:
        """Free the tensors."""
        self._tensors.clear()
        self._borrowed.clear()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())


def weight_bytes(program: Program) -> int:
    """Bytes of a program's parameters here, which are neither packed nor quantized."""
    return sum(math.prod(_shape(p)) * TORCH_DTYPES[p.dtype].itemsize for p in program.params)


def quantize_rows(x: Tensor, group: int, *, rotated: bool = False, widest: Tensor | None = None) -> Tensor:
    """x [rows, cols] rounded to eight bits with one scale a row, halved for a group; see Quantize.

    `widest` [rows, 1]: the greatest magnitude of each row, where it has more columns than x.
    """
    if rotated:
        found = quantize_rows(_turned(x, group), group, widest=widest).unflatten(1, (-1, group))
        return (_rotate(found) * float(weight_share(group))).flatten(1)
    if widest is None:
        widest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(widest < float(TINY), 0.0, widest / 127.0)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    padded = functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    most = padded.abs().amax(-1)
    halvings = (widest.view(torch.int32) - most.view(torch.int32)) >> 23
    share = torch.ldexp(torch.ones_like(most), -halvings.clamp(max=GROUP_BITS))
    share = share.repeat_interleave(group, 1)[:, : x.shape[1]]
    return (x * (inverse / share)).round().clamp(-127, 127) * (scale * share)


def greatest(x: Tensor, group: int, *, rotated: bool = False) -> Tensor:
    """The greatest magnitude of what is rounded of each row, [rows, 1]."""
    return (_turned(x, group) if rotated else x).abs().amax(-1, keepdim=True)


def _turned(x: Tensor, group: int) -> Tensor:
    """x [rows, cols] with every group rotated."""
    return (_rotate(x.unflatten(1, (-1, group))) * float(input_share(group))).flatten(1)


def _rotate(x: Tensor) -> Tensor:
    """As quant.groups.rotate."""
    size, d = x.shape[-1], 1
    while d < size:
        low, high = x.unflatten(-1, (-1, 2, d)).unbind(-2)
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        d *= 2
    return x


def rounded(param: Param, source: Tensor) -> Tensor:
    """Checkpoint numbers as the parameter's format holds them."""
    if param.groups is None:
        return source
    given = quantize(source.float().numpy(), param.groups, param.code_bits)
    return torch.from_numpy(dequantize(param.groups, param.code_bits, given))


def _shape(param: Param) -> tuple[int, ...]:
    return (param.rows,) if param.kind == "vector" else (param.rows, param.cols)
