"""GGUF files: the type of each tensor, by name or by measured errors, and rounding with an importance matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.loader.gguf_writer import Value
from quire.loader.safetensors import SafetensorsFile
from quire.loader.source import TensorInfo
from quire.offline.convert import write_rounded_gguf
from quire.offline.quantize.forward import LayerForward
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.job import QuantizeJob
from quire.offline.quantize.knapsack import Choice, choose
from quire.offline.quantize.layer import LayerWeights
from quire.offline.quantize.quantize_output import Found, Grams, QuantizeResult
from quire.offline.quantize.recipe import Recipe
from quire.offline.quantize.sites import LayerPart, Module
from quire.offline.quantize.unfinished import Tensors, UnfinishedRun
from quire.quant.ggml import READ_TYPES, dequantize
from quire.quant.ggml_encode import ENCODED_TYPES, encode
from quire.records import dataclass
from quire.types import CheckpointError
from quire.util.sizes import format_size

F32 = npt.NDArray[np.float32]
# The type of linears by bits, and what mixed precision chooses from.
BY_BITS = {2: "Q2_K", 3: "Q3_K", 4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 8: "Q8_0"}
_CANDIDATES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
# For rows that are no whole blocks of 256, as llama.cpp falls back; then Q8_0, then float16.
_SMALLER = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q8_0",
    "Q6_K": "Q8_0",
}
# llama.cpp's numbers of file types (general.file_type), by the type of most tensors.
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18,
               "IQ4_NL": 25, "IQ4_XS": 30}  # fmt: skip
_ROWS = 256  # of a weight judge a type


def fitting_type(kind: str, cols: int) -> str:
    """The type of rows of `cols` numbers where `kind` is asked for."""
    while kind != "F16" and cols % READ_TYPES[kind].values:
        kind = _SMALLER.get(kind, "F16")
    return kind


def bits_of(kind: str) -> float:
    """Bits of a number."""
    block = READ_TYPES[kind]
    return 8 * block.nbytes / block.values


def candidates(weight: F32, gram: GramMatrix) -> list[Choice]:
    """What each type costs in bits of a number, and its relative error."""
    every = max(len(weight) // _ROWS, 1)
    sample = np.ascontiguousarray(weight[::every])
    whole = max(float(gram.error(sample).sum(dtype=np.float64)), 1e-30)
    found: dict[str, Choice] = {}
    for asked in _CANDIDATES:
        kind = fitting_type(asked, weight.shape[1])
        if kind == "F16" or kind in found:
            continue
        values = dequantize(encode(sample, kind, gram.importance), READ_TYPES[kind])
        lost = float(gram.error(sample - values).sum(dtype=np.float64))
        found[kind] = Choice(kind, bits_of(kind), lost / whole)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class ImportanceRounding:
    """Rounds linears to the types of `kinds` by tensor, with the importance of their columns; see convert.Rounding.

    `embeddings` are tensors of type `embedding`.
    """

    kinds: Mapping[str, str]
    importance: Mapping[str, F32]
    embeddings: Sequence[str]
    embedding: str
    metadata: Mapping[str, Value]

    def kind(self, tensor: str, shape: tuple[int, ...], plain: str) -> str:
        found = self.embedding if tensor in self.embeddings else self.kinds.get(of_first_expert(tensor))
        return plain if found is None else fitting_type(found, shape[-1])

    def encode(self, values: F32, kind: str, tensor: str) -> npt.NDArray[np.uint8]:
        importance = self.importance.get(tensor)
        if importance is not None and len(importance) != values.shape[-1]:  # latent attention's, transposed
            importance = None
        return encode(values.reshape(-1, values.shape[-1]), kind, importance)


def of_first_expert(tensor: str) -> str:
    """The name of the first expert's tensor: experts are one tensor in a file, so they have one type."""
    return re.sub(r"\.experts\.\d+\.", ".experts.0.", tensor)


def file_type(kinds: Mapping[str, str]) -> int:
    """general.file_type: that of the most frequent type."""
    names = list(kinds.values())
    return _FILE_TYPES[max(sorted(set(names)), key=names.count)]


def check_type(kind: str) -> None:
    """Raise ValueError for a type that is not written."""
    if kind not in ENCODED_TYPES:
        raise ValueError(f"gguf_type: {kind!r} is not one of {', '.join(ENCODED_TYPES)}")


class GGUFOutput:
    """A GGUF file; see QuantizeOutput. Its shards hold the importance of each linear's columns."""

    def __init__(self, job: QuantizeJob, out: Path) -> None:
        if out.suffix != ".gguf":
            raise CheckpointError(f"{out}: a GGUF file needs a name that ends in .gguf")
        self._job = job
        self._type = job.recipe.gguf_type or BY_BITS[job.recipe.bits]
        check_type(self._type)

    def check(self, recipe: Recipe, name: str, rows: int, cols: int) -> None:
        """See QuantizeOutput: rows of any length have a type."""

    def round(
        self, layer: LayerForward, part: LayerPart, weights: LayerWeights, grams: Grams, work: UnfinishedRun,
        pool: Executor,
    ) -> Found:  # fmt: skip
        """Note what each type would cost; the weights are rounded at the end."""
        del layer
        self._importance = {
            module.tensor: grams[site.op, module.expert].importance
            for site in part.sites for module in site.modules if (site.op, module.expert) in grams
        }  # fmt: skip
        modules = [
            (module, grams.get((site.op, module.expert))) for site in part.sites for module in site.modules
        ]
        modules += [(module, None) for module in part.unseen]
        if not self._job.recipe.target_bits:
            work.notes |= {module.tensor: [module.rows * module.cols, []] for module, _ in modules}
            return {}

        def measured(item: tuple[Module, GramMatrix | None]) -> list[Choice]:
            return candidates(weights[item[0].tensor], item[1] or GramMatrix(0))

        for (module, _), choices in zip(modules, pool.map(measured, modules), strict=True):
            work.notes[module.tensor] = [
                module.rows * module.cols,
                [[c.name, c.bits, c.error] for c in choices],
            ]
        return {}

    def tensors(self, layer: LayerForward, weights: LayerWeights, found: Found) -> Tensors:
        """See QuantizeOutput."""
        del layer, weights, found
        return [
            (TensorInfo(name, "F32", each.shape), each) for name, each in sorted(self._importance.items())
        ]

    def finish(self, work: UnfinishedRun, judge: Callable[[Path], None] | None) -> QuantizeResult:
        """See QuantizeOutput."""
        job, kinds = self._job, self._kinds(work)
        importance = _read_importance(work, len(job.layers))
        embeddings = [name for name in (job.spec.names.embed, job.spec.names.head) if name in job.stored]
        text = job.calibration
        metadata: dict[str, Value] = {
            "general.file_type": file_type(kinds),
            "general.quantization_version": 2,
        }
        if text is not None:
            metadata |= {
                "quantize.imatrix.dataset": text.name, "quantize.imatrix.entries_count": len(importance),
                "quantize.imatrix.chunks_count": len(text.windows),
            }  # fmt: skip
        metadata |= {f"quire.quantize.{key}": value for key, value in job.meta().items()}
        embedding = self._type if bits_of(self._type) > bits_of("Q6_K") else "Q6_K"
        rounding = ImportanceRounding(kinds, importance, embeddings, embedding, metadata)
        path = work.folder / "model.gguf"
        notices = write_rounded_gguf(job.model, job.source, path, rounding, None)
        size, stored = path.stat().st_size, sum(job.source.info(name).nbytes for name in job.source.names())
        if judge is not None:
            judge(path)
        work.complete(path)
        counts = {kind: list(kinds.values()).count(kind) for kind in sorted(set(kinds.values()))}
        types = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
        lines = [
            f"linears: {types}",
            f"{format_size(stored)} of weights became a file of {format_size(size)}",
        ]
        return QuantizeResult((*lines, *notices), {})

    def _kinds(self, work: UnfinishedRun) -> dict[str, str]:
        """The type of each linear; experts of a layer have one."""
        recipe = self._job.recipe
        if not recipe.target_bits:
            return dict.fromkeys(work.notes, self._type)
        items: dict[str, tuple[int, list[Choice]]] = {}
        for tensor, (numbers, choices) in work.notes.items():
            name, mine = of_first_expert(tensor), [Choice(*choice) for choice in choices]
            before, others = items.get(name, (0, []))
            if others:
                mine = [Choice(a.name, a.bits, a.error + b.error) for a, b in zip(mine, others, strict=True)]
            items[name] = (before + numbers, mine)
        return choose(items, recipe.target_bits)


def _read_importance(work: UnfinishedRun, layers: int) -> dict[str, F32]:
    found: dict[str, F32] = {}
    for number in range(1, layers + 1):
        path = work.folder / work.shard_name(number)
        if path.exists():
            file = SafetensorsFile(path)
            found |= {name: np.array(file.read(name)) for name in file.names()}
            file.close()
    return found
