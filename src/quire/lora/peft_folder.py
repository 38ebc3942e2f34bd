"""A PEFT folder: adapter_config.json, and adapter_model.safetensors with A and B of each module.

Names of tensors are "base_model.model.", the module's name in transformers, and the part: lora_A.weight [rank, in],
lora_B.weight [out, rank], lora_magnitude_vector [out] for DoRA; lora_embedding_A [rank, vocabulary] and
lora_embedding_B [width, rank] for embeddings. Other tensors are modules_to_save. All experts of a layer
(`target_parameters`) are one pair: A [experts · rank, in], and B [out, rank · experts], in which the experts alternate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.executor.stored_adapters import STORED_TYPES, StoredMatrix, StoredPair
from quire.loader.finite import FLOAT_FORMATS, FiniteTensors, first_nonfinite
from quire.loader.safetensors import SafetensorsFile
from quire.loader.source import TensorInfo
from quire.loader.stacked import Stack
from quire.lora.adapter import LowRank, MatrixRows
from quire.lora.base_modules import BaseModules, linears
from quire.lora.module_pairs import MAX_RANK, AdaptedModule, AdapterFacts, ModulePair, check_rank, unknown
from quire.lora.peft_config import MAX_CONFIG_BYTES, PeftConfig
from quire.lora.saved_rows import SavedRows
from quire.quant.floats import FloatsOrBits, floats, to_float32
from quire.records import dataclass
from quire.spec.config_reader import show
from quire.types import CheckpointError, UnsupportedModelError
from quire.util.strict_json import parse_json_object, read_small_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SAVED_ROWS = 1024  # of a matrix that are read at a time
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.weight)?"
)
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.default)?|\.base_layer)?\.weight")
_EMBEDDINGS = ("embed_tokens", "lm_head")  # PEFT saves them unasked when their sizes changed
# Tensors of all experts, as transformers registers them. PEFT wraps one around the other, so that the name of the first
# has ".base_layer" for each after it.
_OF_EXPERTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A and B of a module, or of `parameter`, a tensor with all its experts; see LowRank for `turned`."""

    module: str
    a: TensorInfo
    b: TensorInfo
    magnitude: TensorInfo | None
    rank: int
    scale: float
    alpha: float
    experts: int = 1
    turned: bool = False  # an embedding: stored for the transposed matrix

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the matrix that it changes."""
        found = self.b.shape[0], self.a.shape[1]
        return found[::-1] if self.turned else found


class PeftFolder:
    """An open folder. Implements AdapterFile.

    Raises CheckpointError or UnsupportedModelError naming file and key for a malformed config or header, a part without
    its other, ranks that differ from the config or exceed MAX_RANK, formats that are not floats, and unknown tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.where = folder.name
        self._config_bytes = read_small_file(folder / CONFIG, MAX_CONFIG_BYTES)
        self.config = PeftConfig.of(parse_json_object(self._config_bytes, CONFIG), CONFIG)
        self._file = SafetensorsFile(folder / WEIGHTS)
        self.identity = self._file.identity
        self._kept = False
        self._last: tuple[str, FloatsOrBits] | None = None  # B of all experts, which is read for each
        try:
            self._pairs, self._saved = self._sorted()
            of_pairs = (info.name for pair in self._pairs for info in pair.tensors)
            self._finite = FiniteTensors(self._file, of_pairs)
        except BaseException:
            self.close()
            raise

    def _sorted(self) -> tuple[list[_Pair], dict[str, TensorInfo]]:
        """The tensors as pairs, and as whole matrices by module."""
        parts: dict[str, dict[str, TensorInfo]] = {}
        saved: dict[str, TensorInfo] = {}
        for name in self._file.names():
            info = self._file.info(name)
            if info.dtype not in FLOAT_FORMATS:
                raise self._error(
                    name, f"dtype {info.dtype} is not one of {', '.join(sorted(FLOAT_FORMATS))}"
                )
            if not name.startswith(_PREFIX):
                raise self._error(name, f"does not begin with {_PREFIX}")
            match = _PART.fullmatch(name[len(_PREFIX) :])
            if match is None:
                module = self._saved_module(name)
                if module in saved:
                    raise self._error(name, f"is a second matrix for {module}")
                saved[module] = info
                continue
            of = parts.setdefault(match["module"], {})
            if match["part"] in of:
                raise self._error(name, f"and {of[match['part']].name} are the same part")
            of[match["part"]] = info
        if not parts and not saved:
            raise CheckpointError(f"{self.where}: {WEIGHTS} has no tensors")
        return [self._pair(module, of) for module, of in parts.items()], saved

    def _error(self, tensor: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tensor {show(tensor)}: {message}")

    def _saved_module(self, name: str) -> str:
        """The module of a tensor that is no part of a pair."""
        match = _WHOLE.fullmatch(name[len(_PREFIX) :])
        if match is None or "lora_" in name:
            raise self._error(name, "is no part of LoRA or DoRA and no weight of modules_to_save")
        module = match["module"]
        asked = (*self.config.saved, *_EMBEDDINGS)
        if not any(module == one or module.endswith(f".{one}") for one in asked):
            raise self._error(name, "is not one of modules_to_save")
        return module

    def _pair(self, module: str, of: Mapping[str, TensorInfo]) -> _Pair:
        magnitude = of.get("lora_magnitude_vector")
        turned = "lora_embedding_A" in of or "lora_embedding_B" in of
        names = ("lora_embedding_A", "lora_embedding_B") if turned else ("lora_A", "lora_B")
        missing = [name for name in names if name not in of]
        if missing or len(of) > 2 + (magnitude is not None):
            there = next(iter(of.values())).name
            raise self._error(
                there, f"lacks {missing[0]}" if missing else "has parts of a linear and an embedding"
            )
        a, b = (of[name] for name in names)
        for info in (a, b):
            if len(info.shape) != 2:
                raise self._error(info.name, f"shape {list(info.shape)} is not that of a matrix")
        self.config.check_layer(f"{module}.", self.where)
        module, key, stacked = self._asked(module)
        rank = self.config.rank_of(key)
        experts = max(a.shape[0] // rank, 1) if stacked else 1
        pair = _Pair(
            module,
            a,
            b,
            magnitude,
            rank,
            self.config.scale_of(key),
            self.config.alpha_of(key),
            experts,
            turned,
        )
        self._check(pair)
        return pair

    def _asked(self, module: str) -> tuple[str, str, bool]:
        """The module or tensor that a pair changes, the name that patterns know it by, and whether it is of experts."""
        inner = module.removesuffix(".base_layer")
        depth = 0
        while inner != module:
            module, inner, depth = inner, inner.removesuffix(".base_layer"), depth + 1
        found = {t.rpartition(".")[2]: t for t in self.config.parameters if f".{module}.".endswith(_owner(t))}
        if found.keys() == {"weight"} and depth == 0:
            return module, f"{module}.weight", False
        order = [name for name in _OF_EXPERTS if name in found]
        if found.keys() > set(order):
            other = next(target for name, target in found.items() if name not in order)
            raise UnsupportedModelError(
                f"{CONFIG}: target_parameters: {show(other)} is not supported: only weight, {' and '.join(_OF_EXPERTS)}"
            )
        if depth >= max(len(order), 1):
            raise CheckpointError(
                f"{self.where}: module {show(module)} is wrapped more often than target_parameters say"
            )
        if not order:
            return module, module, False
        name = f"{module}.{order[len(order) - 1 - depth]}"
        return name, name, True

    def _check(self, pair: _Pair) -> None:
        """Refuse ranks that disagree with each other, the config or the limit, and a magnitude of another size."""
        rows, cols = pair.a.shape[0], pair.b.shape[1]
        check_rank(max(rows, cols) // pair.experts, MAX_RANK, f"{self.where}: module {pair.module}")
        for info, found in ((pair.a, rows), (pair.b, cols)):
            if found != pair.rank * pair.experts:
                raise self._error(
                    info.name,
                    f"rank {found}, but r and rank_pattern of the config imply {pair.rank * pair.experts}",
                )
        if self.config.dora != (pair.magnitude is not None):
            why = "is missing" if self.config.dora else "is there, but use_dora is false"
            raise self._error(pair.a.name, f"its lora_magnitude_vector {why}")
        if pair.magnitude is not None and (pair.turned or pair.experts > 1):
            raise self._error(pair.a.name, "DoRA of embeddings and of stacked experts is not supported")
        if pair.magnitude is not None and math.prod(pair.magnitude.shape) != pair.shape[0]:
            shape = list(pair.magnitude.shape)
            raise self._error(pair.magnitude.name, f"shape {shape}, but B has {pair.shape[0]} rows")

    def facts(self) -> AdapterFacts:
        config = self.config
        return AdapterFacts(
            "PEFT", config.base, f"{'rs' * config.rslora}{'Do' if config.dora else 'Lo'}RA",
            max((pair.rank for pair in self._pairs), default=0),
            tuple(sorted({pair.alpha for pair in self._pairs})),
            sum(self._file.info(name).nbytes for name in self._file.names()),
        )  # fmt: skip

    def targets(self) -> Sequence[AdaptedModule]:
        found = [
            AdaptedModule(
                pair.module, pair.rank, pair.shape, math.prod(pair.a.shape) + math.prod(pair.b.shape)
                + (pair.shape[0] if pair.magnitude is not None else 0), pair.magnitude is not None, pair.experts,
            )
            for pair in self._pairs
        ]  # fmt: skip
        for module, info in self._saved.items():
            rows, cols = (*info.shape, 1, 1)[:2]
            found.append(AdaptedModule(module, 0, (rows, cols), math.prod(info.shape)))
        return found

    def saved(self) -> Mapping[str, tuple[int, ...]]:
        return {module: info.shape for module, info in self._saved.items()}

    def read_saved(self, module: str) -> MatrixRows:
        found = self._saved[module]
        self._kept = True
        for first in range(0, found.shape[0], _SAVED_ROWS):
            data = self._file.read(found.name, first, min(first + _SAVED_ROWS, found.shape[0]))
            bad = first_nonfinite(np.require(data, requirements="A"), found.dtype)
            if bad is not None:
                row, *column = np.unravel_index(bad, data.shape)
                raise self._not_finite(found.name, [row + first, *column])
            self._file.release(found.name)
        return SavedRows(self._file, found.name)

    def pairs(self, base: BaseModules) -> Sequence[ModulePair]:
        return [found for pair in self._pairs for found in self._module_pairs(pair, base)]

    def _module_pairs(self, pair: _Pair, base: BaseModules) -> Iterator[ModulePair]:
        name = base.name(pair.module)
        stack = base.stacks.get(name)
        if stack is not None:
            yield from self._of_experts(pair, stack)
        elif pair.experts > 1 or (name not in base.shapes and name not in base.fused):
            raise unknown(pair.module, pair.a.name, self.where)
        else:
            dora = pair.magnitude is not None
            yield ModulePair(
                name, pair.a.name, pair.rank, pair.shape, lambda: self._low_rank(pair), dora, self._end_of(pair),
                self._stored(pair),
            )  # fmt: skip

    def _low_rank(self, pair: _Pair) -> LowRank:
        a, b = self._matrix(pair.a), self._matrix(pair.b)
        if pair.turned:
            a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
        magnitude = None if pair.magnitude is None else floats(self._matrix(pair.magnitude)).reshape(-1)
        return LowRank(a, b, pair.scale, magnitude)

    def _of_experts(self, pair: _Pair, stack: Stack) -> Iterator[ModulePair]:
        """The pair of all experts of a layer as one for each linear of each expert."""
        count = len(stack.experts)
        if pair.experts != count:
            raise self._error(pair.a.name, f"{pair.experts} experts, but the model has {count}")
        swapped = self._swapped(pair, stack)
        each, end = stack.rows // len(stack.experts[0]), self._end_of(pair)
        for e in range(count):
            for module, rows in linears(stack, e):
                read = self._reader(pair, e, rows, swapped=swapped)
                yield ModulePair(module, pair.a.name, pair.rank, (each, stack.cols), read, end=end)

    def _end_of(self, pair: _Pair) -> int:
        """Where the last of a pair's tensors ends in the file."""
        return max(self._file.place_of(info.name)[1] for info in pair.tensors)

    def _stored(self, pair: _Pair) -> StoredPair | None:
        if pair.turned or pair.magnitude is not None or not {pair.a.dtype, pair.b.dtype} <= STORED_TYPES:
            return None
        a, b = (StoredMatrix(self._file.place_of(info.name)[0], info.dtype) for info in (pair.a, pair.b))
        return StoredPair(a, b, pair.rank, pair.scale)

    def _swapped(self, pair: _Pair, stack: Stack) -> bool:
        """Whether A takes what the linear gives out: PEFT did so before 0.19 for matrices [out, in]."""
        right = pair.shape == (stack.rows, stack.cols)
        other = pair.shape == (stack.cols, stack.rows) and not stack.transposed
        if right and other and not self.config.right_sides:
            raise self._error(
                pair.a.name,
                "the matrices of experts are square: which side is A's is not said by a peft_version of 0.19 or later",
            )
        if not right and not other:
            raise CheckpointError(
                f"{self.where}: {show(pair.module)}: the adapter is for [out, in] = {list(pair.shape)}, but the model "
                f"has {[stack.rows, stack.cols]}: it was trained on another base"
            )
        return not right

    def _reader(self, pair: _Pair, expert: int, rows: slice, *, swapped: bool) -> Callable[[], LowRank]:
        def read() -> LowRank:
            rank = pair.rank
            a = self._matrix(pair.a, expert * rank, (expert + 1) * rank)
            if self._last is None or self._last[0] != pair.b.name:
                self._last = pair.b.name, self._matrix(pair.b)
            b = self._last[1][:, expert :: pair.experts]
            if swapped:
                a, b = np.ascontiguousarray(b.T), a.T
            return LowRank(a, np.ascontiguousarray(b[rows]), pair.scale)

        return read

    def _matrix(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> FloatsOrBits:
        """Rows of a tensor of a pair, in the file where it has them aligned. CheckpointError for NaN and infinity."""
        found = self._finite.first_bad(info.name)
        if found is not None:
            name, bad = found
            raise self._not_finite(name, np.unravel_index(bad, self._file.info(name).shape))
        data = np.require(self._file.read(info.name, start, stop), requirements="A")
        return data if info.dtype == "BF16" else np.ascontiguousarray(to_float32(data, info.dtype))

    def _not_finite(self, name: str, index: Iterable[np.integer[Any]]) -> CheckpointError:
        return self._error(name, f"element {[*map(int, index)]} is NaN or infinite")

    def head(self) -> bytes:
        return b"PEFT" + self._config_bytes

    def close(self) -> None:
        self._last = None
        if self._kept:  # the file is closed with the last matrix that is read later
            for pair in self._pairs:
                for info in pair.tensors:
                    self._file.release(info.name)
        else:
            self._file.close()


def _owner(parameter: str) -> str:
    """The module of a target parameter, between dots."""
    return f".{parameter.rpartition('.')[0]}."


def no_weights(folder: Path) -> str:
    """Why a folder has no weights that can be read."""
    files = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return (
            f"{folder}: {pickles[0]}: pickle files can run code and are never read; save the adapter as safetensors "
            "(save_pretrained of a current PEFT does this)"
        )
    return f"{folder}: no {WEIGHTS} in the folder"
