"""What `quire quantize` is asked for, and what it may not be asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Literal

from quire.records import dataclass

Method = Literal[
    "rtn", "gptq", "awq", "awq-gptq", "smoothquant", "fp8", "gguf", "magnitude", "wanda", "sparsegpt", "structured"
]  # fmt: skip
METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq", "awq-gptq", "smoothquant", "fp8", "gguf")
SCALED = ("awq", "awq-gptq")  # by activations, before they are rounded
PRUNERS: tuple[Method, ...] = ("magnitude", "wanda", "sparsegpt", "structured")  # of `quire prune`
STRUCTURES = ("heads", "channels", "layers")
BITS = (2, 3, 4, 8)
_SAME = 1e-6
_SIZES = (128, 64, 32, 16)
_MIXED = ("rtn", "gptq", *SCALED, "gguf")
_WITHOUT_TEXT = {"rtn", "magnitude"}  # and fp8 with dynamic activations


Pattern = tuple[int, int]
_LARGEST_PATTERN = 128


def parse_pattern(text: str) -> Pattern | None:
    """N:M as numbers; None for no pattern. Raises ValueError."""
    if not text:
        return None
    kept, _, size = text.partition(":")
    numbers = kept.isdecimal() and size.isdecimal() and len(text) <= len("127:128")
    if not numbers or not 0 < int(kept) < int(size) or _LARGEST_PATTERN % int(size):
        raise ValueError(f"pattern: {text!r} is not N:M with 0 < N < M and M one of 2, 4, 8, 16, 32, 64, 128")
    return int(kept), int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is quantized.

    bits, group_size (0: one scale per output; None: 128, or the largest below that divides all input features),
    symmetric (None: not for awq): the grid of rtn, gptq, awq and both together. desc_act, damping: see gptq.
    alpha: how much of the difficulty SmoothQuant moves into the weights. activations: fp8's, "dynamic" or "static".
    gguf_type: the type of linears in a GGUF file. samples windows of `length` tokens are taken of the calibration text.
    target_bits: mean bits of a weight with its share of scales, for mixed precision; the linears' own then stand in
    `bits`' place. sparsity, pattern, structure: the share that is pruned; N:M
    if N of every M weights in a row stay; what goes whole, for the method "structured".
    """

    method: Method = "gptq"
    bits: int = 4
    group_size: int | None = None
    symmetric: bool | None = None
    desc_act: bool = True
    damping: float = 0.01
    alpha: float = 0.5
    activations: str = "dynamic"
    gguf_type: str = ""
    target_bits: float = 0.0
    sparsity: float = 0.5
    pattern: str = ""
    structure: str = ""
    samples: int = 128
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS + PRUNERS:
            raise ValueError(f"method: {self.method!r} is not one of {', '.join(METHODS + PRUNERS)}")
        self._check_pruning()
        if self.method in {"rtn", "gptq", *SCALED} and self.bits not in BITS:
            raise ValueError(f"bits: {self.bits} is not one of {', '.join(map(str, BITS))}")
        if self.method == "gguf" and self.bits not in {2, 3, 4, 5, 6, 8}:
            raise ValueError(f"bits: {self.bits} is not one of 2, 3, 4, 5, 6, 8")
        if self.target_bits and (self.method not in _MIXED or not 1 <= self.target_bits <= 9):
            raise ValueError(
                f"target_bits: {self.target_bits:g} is not from 1 to 9, or {self.method} is not one of "
                f"{', '.join(_MIXED)}"
            )
        if self.method in {"smoothquant", "fp8"} and self.bits != 8:
            raise ValueError(f"bits: {self.method} has 8, not {self.bits}")
        if self.group_size is not None and (self.group_size < 0 or self.group_size % 8):
            raise ValueError(
                f"group_size: {self.group_size} is not a multiple of 8, or 0 for one scale per output"
            )
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping: {self.damping} is not above 0 and at most 1")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: {self.alpha} is not in [0, 1]")
        if self.activations not in {"dynamic", "static"}:
            raise ValueError(f"activations: {self.activations!r} is not dynamic or static")
        for name, least, most in (("samples", 1, 2**20), ("length", 2, 2**17)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"calibration_{name}: {getattr(self, name)} is not in [{least}, {most}]")

    def _check_pruning(self) -> None:
        if not 0 < self.sparsity < 1:
            raise ValueError(f"sparsity: {self.sparsity} is not between 0 and 1")
        if (self.method == "structured") != (self.structure in STRUCTURES):
            raise ValueError(f"structure: {self.structure!r} is not one of {', '.join(STRUCTURES)}")
        pattern = parse_pattern(self.pattern)
        if pattern is not None and abs(self.sparsity - (1 - pattern[0] / pattern[1])) > _SAME:
            share = 1 - pattern[0] / pattern[1]
            raise ValueError(f"sparsity: the pattern {self.pattern} has {share:g}, not {self.sparsity:g}")

    @property
    def needs_text(self) -> bool:
        """Whether the inputs of linears are needed."""
        if self.method == "fp8":
            return self.activations == "static"
        return self.method not in _WITHOUT_TEXT or bool(self.target_bits)

    def fitted(self, columns: Iterable[int]) -> Recipe:
        """This recipe with every choice made, for weights with these numbers of input features."""
        size, columns = self.group_size, set(columns)
        if size is None:
            size = next((size for size in _SIZES if all(cols % size == 0 for cols in columns)), 0)
        symmetric = self.method not in SCALED if self.symmetric is None else self.symmetric
        return replace(self, group_size=size, symmetric=symmetric)

    @property
    def pruned_text(self) -> str:
        """The scheme of a checkpoint with zeros in words."""
        return f"{self.sparsity:.0%} sparse{f' {self.pattern}' if self.pattern else ''} ({self.method})"

    @property
    def in_order(self) -> bool:
        """Whether the linears of a layer are rounded one after another, towards what the original computes."""
        return self.method == "gptq"

    @property
    def passes(self) -> int:
        """How often windows run through a layer that is rounded at once: a second time to pass on what it computes
        when it is changed.
        """
        return 2 if self.method in {"wanda", "sparsegpt", "structured"} else 1

    def described(self) -> dict[str, Any]:
        """The fields that matter for the method, for the checkpoint and for digests."""
        found = asdict(self)
        mine = {
            "rtn": ("bits", "group_size", "symmetric"),
            "gptq": ("bits", "group_size", "symmetric", "desc_act", "damping"),
            "awq": ("bits", "group_size", "symmetric"),
            "awq-gptq": ("bits", "group_size", "symmetric", "desc_act", "damping"),
            "smoothquant": ("bits", "alpha"),
            "fp8": ("bits", "activations"),
            "magnitude": ("sparsity", "pattern"),
            "wanda": ("sparsity", "pattern"),
            "sparsegpt": ("sparsity", "pattern", "damping"),
            "structured": ("structure", "sparsity", "damping"),
            "gguf": ("bits", "gguf_type", "target_bits"),
        }[self.method]
        if self.target_bits and self.method != "gguf":
            mine = ("target_bits", *mine[1:])
        text = ("samples", "length", "seed") if self.needs_text else ()
        return {"method": self.method} | {name: found[name] for name in (*mine, *text)}


def digest(*parts: Any) -> str:
    """SHA-256 over plain values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
