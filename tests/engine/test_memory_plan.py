"""The memory plan is what an engine holds: a bound, and near."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import TinyModel
from helpers.process import Process, running, until
from helpers.tokenizers import save_whole
from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.executor.sampler import HostSampler
from quire.types import MAX_NAMED_TOKENS

MIB = 2**20
UNUSED = ("requests", "grammars", "compiler")  # parts for what these runs do not send, or not at its worst
FILLED_SLOWLY = "records"  # a ring of step records, full only after many more steps than these runs have
NAMED = 100  # tokens in a request's logit_bias

# Large enough that two per cent of the sum is less than what any part of a model takes.
_SIZES = {
    "max_position_embeddings": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "vocab_size": 4608,
}
MODELS = [
    TinyModel("llama", "LlamaConfig", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 8}),
    TinyModel("gemma2", "Gemma2Config", {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 4,
                                         "head_dim": 64, "sliding_window": 64}),
]  # fmt: skip

# Runs the largest steps, waits until every block of the cache is resident, and tells plan and peak.
_FILL = """
import json, sys, time
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], memory=320 * 2**20, request_memory=2**23, max_model_len=512, threads=2, progress=False,
          weight_cache="off", block_size=64)
params = SamplingParams(max_tokens=4, repetition_penalty=1.2, presence_penalty=0.5, top_p=0.9, logprobs=64,
                        ignore_eos=True,
                        logit_bias={token: 1.0 for token in range(4000)})
core = llm.built.executor.core
llm.generate([[5 + i] * 60 for i in range(64)], params, use_tqdm=False)
llm.generate([[5] * 500], SamplingParams(max_tokens=1, prompt_logprobs=64), use_tqdm=False)  # answers are the caller's
while core.kv_warmed < core.kv_bytes:
    llm.generate([[5] * 60], params, use_tqdm=False)
    time.sleep(0.1)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"parts": llm.built.plan.parts, "peak": int(peak.split()[1]) * 1024}))
"""


def test_an_engine_holds_the_predicted_memory() -> None:
    """Within two per cent, with every block, activation and sampling slot used; and never more than the plan."""
    run = subprocess.run(
        [sys.executable, "-c", _FILL, str(shipped_models()[DEFAULT_MODEL])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    held = {part: size for part, size in found["parts"].items() if part not in (*UNUSED, FILLED_SLOWLY)}
    predicted = sum(held.values())
    print(f"predicted {predicted / MIB:.1f} MiB, measured {found['peak'] / MIB:.1f} MiB", held)
    assert found["peak"] <= sum(found["parts"].values())
    assert abs(found["peak"] - predicted) < 0.02 * predicted


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "gemma2", pytest.param("llama", marks=pytest.mark.memory)])
def test_a_server_holds_the_predicted_memory(name: str, tmp_path: Path) -> None:
    """Both processes use the planned memory within two per cent, once everything has been loaded."""
    tiny = next((model for model in MODELS if model.name == name), None)
    folder = shipped_models()[name] if tiny is None else save_whole(tiny, tmp_path / "model")
    options = ("--memory", "384MiB", "--request-memory", "12MiB", "--max-connections", "64", "--threads", "2",
               "--block-size", "64")  # fmt: skip
    with running(folder, "--max-model-len", "512", *options) as server:
        planned = _use(server)
        until(lambda: _debug(server)["processes"]["engine"]["kv"] == planned["kv"])
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        pools = _debug(server)["requests"]
        measured = {"server": _peak(server.process.pid), "engine": _peak(server.engine)}
        for connection in connections:
            connection.close()
    vocab = 4096 if tiny is None else _SIZES["vocab_size"]
    worst, here = (
        HostSampler.memory_bound(vocab, 64, 2, 512, named, 128) for named in (MAX_NAMED_TOKENS, NAMED)
    )
    assert planned["sampler"] == worst
    of_server = planned["server"] + planned["connections"]
    predicted = {
        "server": of_server,
        "engine": sum(planned.values())
        - of_server
        - sum(map(planned.__getitem__, (*UNUSED, FILLED_SLOWLY)))
        - worst
        + here,
    }
    for process, size in predicted.items():
        print(f"{name} {process}: predicted {size / MIB:.1f} MiB, measured {measured[process] / MIB:.1f} MiB")
    bound = sum(predicted.values()) + planned[FILLED_SLOWLY] + sum(pool["peak"] for pool in pools.values())
    assert sum(measured.values()) <= bound
    assert abs(sum(measured.values()) - sum(predicted.values())) < 0.02 * sum(predicted.values())


def _use(server: Process) -> dict[str, int]:
    """Everything that makes a process grow, once: pages, chat, largest steps, every slot; the plan."""

    def complete(**fields: Any) -> None:
        reply = server.request("POST", "/v1/completions", {"temperature": 1.0, "ignore_eos": True} | fields)
        assert reply.status == 200, reply.text

    def score(i: int) -> None:
        ids = list(range(450 * i + 1, 450 * (i + 1)))  # all tokens in the end
        complete(
            prompt=ids, max_tokens=1, prompt_logprobs=64, logprobs=20, return_tokens_as_token_ids=i % 2 == 0
        )

    def sample(i: int) -> None:
        complete(
            prompt=[5 + i] * 60, max_tokens=4, logprobs=20, repetition_penalty=1.2, presence_penalty=0.5, top_p=0.9,
            logit_bias={str(token): 1.0 for token in range(NAMED)},
        )  # fmt: skip

    for path in ("/metrics", "/openapi.json"):
        assert server.request("GET", path).status == 200
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 5,
    }
    assert server.request("POST", "/v1/chat/completions", chat).status == 200
    with concurrent.futures.ThreadPoolExecutor(64) as clients:
        list(clients.map(score, range(9)))
        list(clients.map(sample, range(64)))
    planned: dict[str, int] = _debug(server)["planned"]
    return planned


def _debug(server: Process) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", "/debug/memory").json
    return found


def _peak(pid: int) -> int:
    """The most that a process has held."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024
