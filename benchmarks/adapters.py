"""What adapters of low rank cost: decoding beside the same engine without them, traffic of many, and loading.

    python -m benchmarks.adapters [decode|traffic|loading ...] [--shape qwen3-0.6b] [--formats none int4] [--rank 16]

Random weights; adapters of all linears of attention and feed-forwards, as files. Prints Markdown, and JSON with --json.

`decode`: a case is FORMAT:STREAMS:ADAPTERS; its streams have the adapters in turn. For each format there are two
engines, without adapters and with room for all of them, which run each case in turn. A row says the tokens per second
of decoding steps in which all streams run: of the first engine, of the second without adapters and with them. Beside it
are the bytes of the base's weights and of all matrices A and B that a step reads once, and the share of the first in
both: what a step that waits for memory alone would reach.

`traffic`: --registered adapters, asked for by Zipf's law (exponent 1), 32 requests at once, of which those in a step
have up to 8 adapters. For each pool, in adapters that fit: tokens per second of the whole run, and the share of
requests whose adapter was in the pool.

`loading`: from the call to the first token of a one-token prompt, less the same without an adapter: in the pool; from a
file that the page cache has; and from one that it has not; and from both when they have not been written to for so long
that they are not hashed again. The time of reading alone is beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.bench.random_checkpoint import write_tokenizer
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import TensorInfo
from quire.lora.base_modules import BaseModules
from quire.lora.leaf_hash import REST_NS
from quire.planner.shapes import SHAPES
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.lowering import LoraRoom
from quire.program.memory import low_rank_bytes, param_bytes
from quire.records import dataclass
from quire.spec import read_model

PROMPT = 64
PARTS = ("decode", "traffic", "loading")


@dataclass(frozen=True, slots=True)
class Place:
    """A model of random weights, which has no file of them, and adapters for it."""

    model: Path
    adapters: tuple[Path, ...]

    def engine(self, form: str, most: int, rank: int, **more: Any) -> LLM:
        """An engine with up to so many adapters at once; 0 for one without."""
        room: dict[str, Any] = {"enable_lora": True, "max_loras": most, "max_lora_rank": rank} if most else {}
        return LLM(
            self.model, load_format="random", max_num_seqs=32, max_model_len=512, progress=False, dtype="bfloat16",
            enable_prefix_caching=False, quantization=form, **room, **more,
        )  # fmt: skip


@contextmanager
def prepared(shape: str, count: int, rank: int) -> Iterator[Place]:
    """A folder with a model and adapters of equal size; their numbers differ in the first matrix."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(SHAPES[shape]))
        write_tokenizer(root / "model")
        for number in range(count):
            write_adapter(root / f"a{number}", root / "model", rank, number)
        yield Place(root / "model", tuple(root / f"a{number}" for number in range(count)))


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """A PEFT folder with random numbers for all linears of attention and feed-forwards."""
    spec = read_model(model).spec
    shapes, random = BaseModules.of(spec).shapes, np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    block = random.integers(0, 2**15, 2**22, np.uint16)
    for adapted in lower(spec, NumberFormats(), lora=LoraRoom(rank)).adapted:
        for module in (part.module for part in adapted.parts):
            rows, cols = shapes[module]
            for letter, shape in (("A", (rank, cols)), ("B", (rows, rank))):
                numbers = block[: shape[0] * shape[1]].reshape(shape) & 0x3FF  # bfloat16 of 2^-9 and below
                arrays[f"base_model.model.{module}.lora_{letter}.weight"] = numbers | 0x3B00
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "task_type": "CAUSAL_LM"}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in arrays})
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    write_safetensors(
        folder / "adapter_model.safetensors",
        [TensorInfo(name, "BF16", array.shape) for name, array in sorted(arrays.items())],
        lambda info: iter([arrays[info.name]]),
    )


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(3, 200, PROMPT).tolist() for seed in range(count)]


def rate(llm: LLM, streams: int, tokens: int, adapters: list[str]) -> float:
    """Tokens per second of the decoding steps of `streams` streams."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before = llm.step_records()[-1].step if llm.step_records() else 0
    llm.generate(prompts(streams), params, adapter=adapters, use_tqdm=False)
    seconds = [
        record.schedule_seconds + record.execute_seconds + record.update_seconds
        for record in llm.step_records()
        if record.step > before and record.rows == streams == record.decode_tokens
    ]
    return streams / statistics.median(seconds)


def decode(place: Place, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case."""
    cases: dict[str, list[tuple[int, int]]] = {}
    for case in asked.cases:
        form, streams, count = case.split(":")
        if form in asked.formats:
            cases.setdefault(form, []).append((int(streams), int(count)))
    found = []
    for form, each in cases.items():
        most = max(count for _, count in each)
        with place.engine(form, 0, 0) as plain, place.engine(form, most, asked.rank) as llm:
            for number in range(most):
                llm.load_adapter(f"a{number}", place.adapters[number])
            for streams, count in each:
                names = [f"a{stream % count}" for stream in range(streams)]
                runs = [
                    (
                        rate(plain, streams, asked.tokens, [""] * streams),
                        rate(llm, streams, asked.tokens, [""] * streams),
                        rate(llm, streams, asked.tokens, names),
                    )
                    for _ in range(asked.repeat + 1)
                ][1:]
                base, unused, used = (statistics.median(run[i] for run in runs) for i in range(3))
                shares = [statistics.median(run[i] / run[0] for run in runs) for i in (1, 2)]
                weights, matrices = bytes_of_a_step(llm, count)
                found.append(
                    {
                        "weights": form, "streams": streams, "adapters": count, "weights, MB": round(weights / 1e6),
                        "A and B, MB": round(matrices / 1e6), "by bytes": f"{weights / (weights + matrices):.1%}",
                        "without, tok/s": round(base, 1), "pool unused": round(unused, 1), "used": round(used, 1),
                        "share unused": f"{shares[0]:.1%}", "share used": f"{shares[1]:.1%}",
                    }
                )  # fmt: skip
    return found


def bytes_of_a_step(llm: LLM, adapters: int) -> tuple[int, int]:
    """Bytes of the weights that a step reads, all but the table of embeddings unless it is the head too; and those of
    the matrices of so many adapters."""
    program = llm.built.program
    named = {getattr(op, "weight", None) for op in program.ops}
    weights = sum(param_bytes(param) for param in program.params if param.name in named)
    return weights, adapters * low_rank_bytes(program)


def traffic(place: Place, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each size of the pool."""
    form, random = asked.formats[-1], np.random.default_rng(0)
    weights = 1 / np.arange(1, asked.registered + 1)
    chosen = random.choice(asked.registered, asked.requests, p=weights / weights.sum())
    names = [f"a{number}" for number in chosen]
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True)
    found = []
    size = (place.adapters[0] / "adapter_model.safetensors").stat().st_size  # bfloat16, as in the pool
    for pool in asked.pools:
        with place.engine(form, min(pool, 8), asked.rank, lora_memory=int(1.02 * pool * size)) as llm:
            for number in range(asked.registered):
                llm.load_adapter(f"a{number}", place.adapters[number])
            service = llm.built.core.adapters
            assert service is not None
            start = time.perf_counter()
            llm.generate(prompts(asked.requests), params, adapter=names, use_tqdm=False)
            seconds = time.perf_counter() - start
            loads = sum(service.loads.values())
            found.append(
                {
                    "weights": form, "registered": asked.registered, "pool": pool, "requests": asked.requests,
                    "tok/s": round(asked.requests * asked.tokens / seconds, 1), "loads": loads,
                    "hit rate": f"{1 - loads / asked.requests:.1%}",
                }
            )  # fmt: skip
    return found


def loading(place: Place, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each place that an adapter comes from."""
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    size = (place.adapters[0] / "adapter_model.safetensors").stat().st_size
    with place.engine(asked.formats[-1], 1, asked.rank) as llm:

        def first(name: str) -> float:
            start = time.perf_counter()
            llm.generate([[5]], one, adapter=name, use_tqdm=False)
            return time.perf_counter() - start

        def evicted(*, cold: bool) -> float:
            """The median; the adapters are loaded in turns into a pool of one."""
            found = []
            for number in range(asked.loads + 1):
                if cold:
                    _drop(place.adapters[number % 2])
                found.append(first(f"a{number % 2}"))
            return statistics.median(found[1:])

        def register() -> None:
            for number in range(2):
                llm.load_adapter(f"a{number}", place.adapters[number])

        register()
        first("a0")
        base = statistics.median(first("") for _ in range(asked.loads))
        rows = {"the pool": statistics.median(first("a0") for _ in range(asked.loads))}
        rows |= {"page cache": evicted(cold=False), "disk": evicted(cold=True)}
        time.sleep(REST_NS / 1e9)
        register()
        rows |= {
            "page cache, long unchanged": evicted(cold=False),
            "disk, long unchanged": evicted(cold=True),
        }
        rows = {name: seconds - base for name, seconds in rows.items()}
    reads = []
    for _ in range(asked.loads):
        _drop(place.adapters[0])
        start = time.perf_counter()
        (place.adapters[0] / "adapter_model.safetensors").read_bytes()
        reads.append(time.perf_counter() - start)
    rows["reading the file alone, from disk"] = statistics.median(reads)
    return [
        {"from": name, "ms to the first step": round(1000 * seconds, 2), "MiB": round(size / 2**20, 1)}
        for name, seconds in rows.items()
    ]


def _drop(folder: Path) -> None:
    """Have the page cache forget an adapter's file."""
    file = os.open(folder / "adapter_model.safetensors", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one kind as Markdown."""
    names = list(rows[0])
    lines = [names, ["--:" if isinstance(rows[0][name], int | float) else "---" for name in names]]
    lines += [[str(row[name]) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["none", "int4"])
    cases = ["none:1:1", "none:32:8", "int4:1:1", "int4:32:8", "int4:32:32"]
    parser.add_argument("--cases", nargs="+", default=cases)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--registered", type=int, default=128)
    parser.add_argument("--pools", type=int, nargs="+", default=[8, 16, 32], help="adapters that fit")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--loads", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    parts = asked.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts: {sorted(unknown)} are not among {', '.join(PARTS)}")
    count = max([int(case.rpartition(":")[2]) for case in asked.cases] + [2])
    if "traffic" in parts:
        count = max(count, asked.registered)
    with prepared(asked.shape, count, asked.rank) as place:
        for part in parts:
            rows = {"decode": decode, "traffic": traffic, "loading": loading}[part](place, asked)
            print(json.dumps({part: rows}) if asked.json else f"{table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
