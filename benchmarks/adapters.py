"""Decoding with adapters of low rank, beside the same engine without them.

    python benchmarks/adapters.py [--shape qwen3-0.6b] [--formats none int4] [--cases 1:1 32:8 32:32] [--rank 16]

Random weights. A case is STREAMS:ADAPTERS; its streams have the adapters in turn. For each format there are two
engines, without adapters and with slots for all of them, which run each case in turn, `--repeat` times. A row says the
tokens per second of decoding steps in which all streams run: of the first engine, of the second without adapters and
with them, and the shares. Prints JSON, and the same as a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.bench.random_checkpoint import write_tokenizer
from quire.bench.shapes import SHAPES
from quire.lora.adapter import Adapter, LowRank
from quire.program.program import Program

PROMPT = 64


def random_adapter(program: Program, seed: int, rank: int) -> Adapter:
    """All linears that adapters may change."""
    random = np.random.default_rng(seed)
    parts = {
        part.module: LowRank(
            random.standard_normal((rank, adapted.cols), np.float32) / np.float32(adapted.cols**0.5),
            random.standard_normal((part.rows, rank), np.float32) / np.float32(100),
            1.0,
        )
        for adapted in program.adapted
        for part in adapted.parts
    }
    return Adapter(f"a{seed}", f"{seed:064x}", rank, parts, {})


def rate(llm: LLM, streams: int, tokens: int, adapters: list[str]) -> float:
    """Tokens per second of the decoding steps of `streams` streams."""
    prompts = [np.random.default_rng(seed).integers(3, 200, PROMPT).tolist() for seed in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before = llm.step_records()[-1].step if llm.step_records() else 0
    llm.generate(prompts, params, adapter=adapters, use_tqdm=False)
    seconds = [
        record.schedule_seconds + record.execute_seconds + record.update_seconds
        for record in llm.step_records()
        if record.step > before and record.rows == streams == record.decode_tokens
    ]
    return streams / statistics.median(seconds)


def measure(
    shape: str, form: str, cases: list[tuple[int, int]], asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each case."""
    most = max(count for _, count in cases)
    common: dict[str, Any] = {
        "load_format": "random", "max_num_seqs": 32, "max_model_len": 512, "progress": False, "dtype": "bfloat16",
        "enable_prefix_caching": False, "quantization": form,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        write_tokenizer(folder)
        slots: dict[str, Any] = {"enable_lora": True, "max_loras": most, "max_lora_rank": asked.rank}
        with LLM(folder, **common) as plain, LLM(folder, **slots, **common) as llm:
            for number in range(most):
                llm.load_adapter(f"a{number}", random_adapter(llm.built.program, number, asked.rank))
            found = []
            for streams, count in cases:
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
                found.append(
                    {
                        "format": form,
                        "streams": streams,
                        "adapters": count,
                        "without": base,
                        "unused": unused,
                        "used": used,
                        "share_unused": unused / base,
                        "share_used": used / base,
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["none", "int4"])
    parser.add_argument("--cases", nargs="+", default=["1:1", "32:8", "32:32"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    cases = [
        (int(streams), int(count)) for streams, _, count in (case.partition(":") for case in asked.cases)
    ]
    rows = [row for form in asked.formats for row in measure(asked.shape, form, cases, asked)]
    print(json.dumps(rows))
    print(
        "| weights | streams | adapters | without, tokens/s | slots, unused | used | share unused | share used |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        rates = " | ".join(f"{row[name]:.1f}" for name in ("without", "unused", "used"))
        shares = " | ".join(f"{row[name]:.1%}" for name in ("share_unused", "share_used"))
        print(f"| {row['format']} | {row['streams']} | {row['adapters']} | {rates} | {shares} |")


if __name__ == "__main__":
    main()
