"""Ranks in processes beside one process: `python -m benchmarks.ranks [--shape qwen3-0.6b] [--rounds 3]`.

One process of two threads and of one, two ranks of one thread, and two stages of one thread, in turns; the latter two
also on "two hosts", which meet at an address of the loopback. Prompts, and sequences that decode; the time of
collectives; the memory of each process beside the plan. `--only` takes the plans whose names have these words. `--what
memory` compares what each rank holds with its part of the plan, `--what bubbles` the idle time of stages with formulas.

Bounds of two stages, from what one process takes for a step of half of the sequences: with one thread the share of the
dearest stage (the stage bound), with two threads all of it (the machine's).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, SamplingParams
from quire.config.launched import variables_of
from quire.config.shipped import shipped_models
from quire.executor.native import NativeKind
from quire.planner.shapes import SHAPES
from quire.program.cost import step_cost
from quire.program.ops.collectives import AllGather, AllReduce, AllToAll
from quire.program.stages import DECODE

ONE, HALF, STAGES = "one process, 2 threads", "one process, 1 thread", "2 stages of 1 thread"
PLANS: dict[str, dict[str, Any]] = {
    ONE: {"threads": 2},
    HALF: {"threads": 1},
    "2 ranks of 1 thread": {"threads": 1, "tensor_parallel_size": 2},
    STAGES: {"threads": 1, "pipeline_parallel_size": 2},
    "2 ranks on 2 hosts": {"threads": 1, "tensor_parallel_size": 2, "nnodes": 2},
    "2 stages on 2 hosts": {"threads": 1, "pipeline_parallel_size": 2, "nnodes": 2},
}
COMMON: dict[str, Any] = {
    "max_model_len": 1536,
    "num_kv_blocks": 512,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
}
PROMPTS, DECODING = (256, 1024), (1, 2, 4, 8, 16, 32)
COLLECTIVES = (AllGather, AllReduce, AllToAll)


def measure(llm: LLM) -> dict[str, float]:
    """Tokens a second: of prompts of some tokens, and of sequences that decode."""

    def seconds(rows: int, prompt: int, tokens: int) -> float:
        prompts = [np.random.default_rng(row).integers(3, 200, prompt).tolist() for row in range(rows)]
        began = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    seconds(1, 8, 2)
    found = {f"prefill {length}": length / seconds(1, length, 1) for length in PROMPTS}
    for rows in DECODING:
        tokens = 24 if rows < 8 else 8
        start = seconds(rows, 4, 1)
        found[f"decode {rows}"] = rows * tokens / (seconds(rows, 4, 1 + tokens) - start)
    return found


def bounds(found: dict[str, Any], share: float) -> dict[str, float]:
    """Tokens a second that two stages could reach, the dearest of which has a share of a step's bytes."""
    made = {}
    for rows in DECODING[1:]:
        whole = [rows // 2 / found[plan][f"decode {rows // 2}"] for plan in (HALF, ONE)]
        made[f"decode {rows}"] = rows // 2 / max(share * whole[0], whole[1])
    return made


def seconds_of(llm: LLM, rows: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds that so many prompts and their tokens take, and the mean over ranks of those in which a rank works."""
    ranks = llm.built.ranks
    assert ranks is not None
    prompts = [np.random.default_rng(row).integers(3, 200, prompt).tolist() for row in range(rows)]
    before, began = ranks.worked(), time.perf_counter()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    spent = time.perf_counter() - began
    worked = [later[0] - earlier[0] for later, earlier in zip(ranks.worked(), before, strict=True)]
    return spent, statistics.fmean(worked)


def bubbles(llm: LLM) -> dict[str, tuple[float, float]]:
    """The share of the time in which two stages idle, as measured, and by the formula: n steps one after the other, of
    which the dearest stage takes a share s, take 1 + (n - 1) s times the time of one in which nothing overlaps. A
    sequence that decodes alone has no step beside its own. What is measured is of whole requests: prompts of those
    that decode have 4 tokens, others are taken in chunks of 64."""
    found, share = {}, dearest_share(llm)
    for name, rows, prompt, tokens, steps in (
        ("decode 1", 1, 4, 33, 1),
        ("decode 8", 8, 4, 25, 2 * 25),
        ("decode 32", 32, 4, 17, 2 * 17),
        ("prefill 256", 1, 256, 1, 4),
        ("prefill 1024", 1, 1024, 1, 16),
    ):
        spent, worked = seconds_of(llm, rows, prompt, tokens)
        formula = 1 - steps / 2 / (1 + (steps - 1) * share)
        found[name] = round(1 - worked / spent, 3), round(formula, 3)
    return found


def memory_beside_plan(folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """Of each rank's process, in MiB: what the plan says of its weights, cache and tables, and the memory that it has
    to itself besides an interpreter, once all of its cache has been used. Activations are in memory that ranks share.
    An interpreter is what a rank of quire-mini holds besides its plan."""
    common: dict[str, Any] = {
        "max_model_len": 1152,
        "num_kv_blocks": 72,
        "enable_prefix_caching": False,
        "weight_cache": "off",
    }
    found: list[list[tuple[int, int]]] = []
    for model in (shipped_models()["quire-mini"], folder):
        given = common | options | ({"load_format": "random"} if model is folder else {})
        with LLM(model, progress=False, **given) as llm:
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            llm.generate([[5] * 1136], params, use_tqdm=False)
            assert llm.built.ranks is not None
            programs, kind = llm.built.ranks.programs, NativeKind(options["threads"])
            parts = [kind.planned_bytes(program, llm.built.plan.limits) for program in programs]
            own = [sum(each.values()) - each["activations"] for each in parts]
            pids = llm.built.ranks.pids
            found.append([(own[rank], memory_of(pid, "Pss_Anon:")) for rank, pid in pids.items()])
    small, large = found
    made = []
    for (other, interpreter), (planned, whole) in zip(small, large, strict=True):
        held = whole - (interpreter - other)
        made.append({"planned": planned / 2**20, "held": held / 2**20, "ratio": held / planned})
    return made


def dearest_share(llm: LLM) -> float:
    """Of the bytes of a step: the share of the stage that reads most."""
    assert llm.built.ranks is not None
    costs = [step_cost(program, DECODE, len(DECODE)).total.bytes for program in llm.built.ranks.programs]
    return max(costs) / sum(costs)


def memory_of(pid: int, kind: str = "Pss:") -> int:
    """Bytes of a process, of which a page that several share counts in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


@contextmanager
def opened(folder: Path, options: dict[str, Any]) -> Iterator[LLM]:
    """A model of random weights, on as many hosts as `nnodes` says: each but this process is one of `quire serve`."""
    options, nodes = dict(options), options.get("nnodes", 1)
    options.pop("nnodes", None)
    if nodes == 1:
        with LLM(folder, progress=False, **options) as llm:
            yield llm
        return
    secret, address = secrets.token_hex(16), f"127.{secrets.randbelow(256)}.{secrets.randbelow(256)}.1"
    env = {**os.environ, "QUIRE_RANK_SECRET": secret}
    flags = [
        word
        for name, value in options.items()
        for word in (
            ("--no-" if value is False else "--") + name.replace("_", "-"),
            *([str(value)] if value else []),
        )
    ]
    command = [sys.executable, "-m", "quire", "serve", str(folder), *flags, "--quiet", "--nnodes", str(nodes)]
    others = [
        subprocess.Popen([*command, "--node-rank", str(node), "--master-addr", address], env=env)
        for node in range(1, nodes)
    ]
    own = variables_of(nodes, 0, address, None) | {"QUIRE_RANK_SECRET": secret}
    os.environ.update(own)
    try:
        with LLM(folder, progress=False, **options) as llm:
            yield llm
    finally:
        for name in own:
            del os.environ[name]
        for other in others:
            other.kill()
            other.wait()


def run(folder: Path, rounds: int, plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Medians of some rounds in turns, and their least and greatest."""
    found: dict[str, Any] = {name: {} for name in plans}
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in plans}
    share = 1.0
    for number in range(rounds):
        for name, options in plans.items():
            with opened(folder, {"load_format": "random", **COMMON, **options}) as llm:
                for what, rate in measure(llm).items():
                    rates[name].setdefault(what, []).append(rate)
                if "tensor_parallel_size" in options:
                    found[name]["step"] = collectives(llm)
                if name == STAGES:
                    share = dearest_share(llm)
                if not number:
                    pids = [os.getpid(), *(llm.built.ranks.pids.values() if llm.built.ranks else ())]
                    plan = llm.built.plan.parts
                    found[name]["pss_mib"] = [memory_of(pid) >> 20 for pid in pids]
                    found[name]["planned_mib"] = {
                        part: plan[part] >> 20 for part in ("weights", "kv", "activations", "tables")
                    }
    for name, of in rates.items():
        found[name] |= {what: statistics.median(each) for what, each in of.items()}
        found[name]["spread"] = {what: (min(each), max(each)) for what, each in of.items()}
    if {ONE, HALF, STAGES} <= plans.keys():
        found[STAGES]["bounds"] = bounds(found, share)
    return found


def collectives(llm: LLM) -> dict[str, float]:
    """Of a decode step of one sequence: collectives, microseconds of each, and their share of the time of all ops."""
    executor = llm.built.executor
    executor.profile(on=True)
    llm.generate([[5] * 200], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    executor.take_profile()
    llm.generate([[5] * 8], SamplingParams(max_tokens=33, temperature=0, ignore_eos=True))
    seconds, _ = executor.take_profile()
    executor.profile(on=False)
    wire = [
        spent for op, spent in zip(executor.program.ops, seconds, strict=True) if isinstance(op, COLLECTIVES)
    ]
    steps = 33
    return {
        "collectives": len(wire), "us_each": sum(wire) / steps / max(len(wire), 1) * 1e6,
        "share": sum(wire) / sum(seconds),
    }  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--what", default="rates", choices=("rates", "memory", "bubbles"))
    parser.add_argument("--only", default="", help="words of the names of plans, separated by commas")
    args = parser.parse_args()
    plans = {name: each for name, each in PLANS.items() if any(word in name for word in args.only.split(","))}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        if args.what == "rates":
            print(json.dumps(run(Path(folder), args.rounds, plans), indent=1))
            return
        found: dict[str, Any] = {}
        for name, each in plans.items():
            if args.what == "memory" and len(each) == 2:
                found[name] = memory_beside_plan(Path(folder), each)
            elif args.what == "bubbles" and name == STAGES:
                with opened(Path(folder), {"load_format": "random", **COMMON, **each}) as llm:
                    found[name] = bubbles(llm)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
