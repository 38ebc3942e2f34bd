"""Options of other servers that Quire has not: what each is called here, or why there is none.

Somebody who moves a command line over learns in one line what to change. Names of vLLM, SGLang, llama-server and TGI.
"""

from __future__ import annotations

# Would change what is served or how, so the start stops and says why.
_ONE_PROCESS = "one process computes a model"
_ADAPTERS = "adapters are not supported"
_TOOLS = "tool calls are not parsed"
_CHECKPOINT = "it is part of the checkpoint"
_HUB = "files of the hub are in the care of huggingface_hub: set the environment variable {}"
_STRUCTURED = "structured output is not supported"
_REQUEST = "a request brings its own, and the checkpoint's generation_config.json the defaults"
REFUSED: dict[str, str] = {
    "trust-remote-code": "code in checkpoints is never run",
    "tokenizer": _CHECKPOINT,
    "tokenizer-revision": _CHECKPOINT,
    "hf-config-path": _CHECKPOINT,
    "hf-overrides": _CHECKPOINT,
    "rope-scaling": _CHECKPOINT,
    "rope-theta": _CHECKPOINT,
    "download-dir": _HUB.format("HF_HUB_CACHE to the folder"),
    "hf-token": _HUB.format("HF_TOKEN"),
    "hf-file": "write it behind the model's name: organisation/name:file.gguf",
    "revision": "give the folder of the revision that was downloaded",
    "chat-template-content-format": "the template itself shows which form it takes",
    "prefix-caching-hash-algo": "prefixes are found in a tree of tokens, not by hashes",
    "enable-expert-parallel": _ONE_PROCESS,
    "enable-lora": _ADAPTERS,
    "lora-modules": _ADAPTERS,
    "max-loras": _ADAPTERS,
    "lora": _ADAPTERS,
    "speculative-config": "speculation is not supported",
    "speculate": "speculation is not supported",
    "spec-type": "speculation is not supported",
    "kv-transfer-config": "the KV cache stays in the engine",
    "kv-events-config": "the KV cache stays in the engine",
    "slot-save-path": "the KV cache stays in the engine",
    "enable-auto-tool-choice": _TOOLS,
    "tool-call-parser": _TOOLS,
    "reasoning-parser": "reasoning is not separated from the answer",
    "reasoning-budget": "reasoning is not separated from the answer",
    "allowed-media-domains": "images and other media are not accepted, and no address is ever fetched",
    "limit-mm-per-prompt": "images and other media are not accepted",
    "models-dir": "a server serves one model",
    "embedding": "the server generates text only",
    "embeddings": "the server generates text only",
    "structured-outputs-config": _STRUCTURED,
    "guided-decoding-backend": _STRUCTURED,
    "grammar-backend": _STRUCTURED,
    "attention-backend": "the kernels are Quire's own",
    "override-generation-config": _REQUEST,
    "default-chat-template-kwargs": _REQUEST,
    "temp": _REQUEST,
    "n-predict": "a request names its own max_tokens; quire generate has --max-tokens",
    "-n": "a request names its own max_tokens; quire generate has --max-tokens",
    "-p": "it is the prompt of quire generate; the port of quire serve is --port",
    "max-logprobs": "a request may ask for 20 in a chat and 64 in a completion",
    "allow-credentials": "keys travel in a header, never in cookies",
    "allowed-methods": "the methods of the routes are allowed, and no other",
    "allowed-headers": "the headers that the routes read are allowed, and no other",
    "root-path": "a proxy in front has to remove the prefix",
    "middleware": "no code is loaded into the server",
    "ssl-ca-certs": "certificates of clients are not checked",
    "ssl-cert-reqs": "certificates of clients are not checked",
}
# Switches that ask for what is done anyway: they are taken, and change nothing.
ALWAYS: dict[str, str] = {
    "enable-prompt-tokens-details": "usage always tells the cached tokens",
    "enable-cache-report": "usage always tells the cached tokens",
    "enable-metrics": "/metrics is always there",
    "metrics": "/metrics is always there",
    "enable-deterministic-inference": "one request gives the same bits whatever else runs",
    "enforce-eager": "steps run as they are, without captured graphs",
    "disable-cuda-graph": "steps run as they are, without captured graphs",
    "disable-log-requests": "requests are logged with --access-log only",
    "no-enable-log-requests": "requests are logged with --access-log only",
    "disable-uvicorn-access-log": "requests are logged with --access-log only",
    "disable-log-stats": "statistics are at /metrics, not in the log",
    "disable-custom-all-reduce": _ONE_PROCESS,
    "cont-batching": "batches are continuous unless --batching says otherwise",
    "-cb": "batches are continuous unless --batching says otherwise",
    "jinja": "templates are always rendered",
    "enable-per-request-metrics": "a request asks for its own with `timings`",
}
# The same with values: those that ask for what is done anyway, and why no others are taken.
PASSING: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor-parallel-size": (("1",), _ONE_PROCESS),
    "pipeline-parallel-size": (("1",), _ONE_PROCESS),
    "-tp": (("1",), _ONE_PROCESS),
    "-pp": (("1",), _ONE_PROCESS),
    "tp-size": (("1",), _ONE_PROCESS),
    "tp": (("1",), _ONE_PROCESS),
    "num-shard": (("1",), _ONE_PROCESS),
    "data-parallel-size": (("1",), "start several servers behind a balancer"),
    "-dp": (("1",), "start several servers behind a balancer"),
    "n-gpu-layers": (("0",), "the native kernels run on the CPU"),
    "gpu-layers": (("0",), "the native kernels run on the CPU"),
    "-ngl": (("0",), "the native kernels run on the CPU"),
    "flash-attn": (("on", "auto", "1"), "attention never stores the matrix of scores"),
    "-fa": (("on", "auto", "1"), "attention never stores the matrix of scores"),
    "swap-space": (("0",), "preempted sequences are computed again, not swapped"),
    "cpu-offload-gb": (("0",), "the weights are in this machine's memory anyway"),
    "tokenizer-mode": (("auto",), _CHECKPOINT),
    "config-format": (("auto", "hf"), _CHECKPOINT),
    "generation-config": (("auto",), _REQUEST),
    "runner": (("auto", "generate"), "the server generates text only"),
    "task": (("auto", "generate"), "the server generates text only"),
    "preemption-mode": (("recompute",), "preempted sequences are computed again"),
    "response-role": (("assistant",), "answers are the assistant's"),
}
# The same under another name.
CALLED: dict[str, str] = {
    "hostname": "--host",
    "api-keys": "--api-key",
    "quantize": "--quantization",
    "kv-cache-memory-bytes": "--memory",
    "num-gpu-blocks-override": "--num-kv-blocks",
    "disable-radix-cache": "--no-enable-prefix-caching",
    "batch-size": "--max-num-batched-tokens",
    "ubatch-size": "--max-num-batched-tokens",
    "threads-batch": "--threads",
    "uvicorn-log-level": "--log-level",
    "enable-log-requests": "--access-log",
    "log-requests": "--access-log",
    "mem-fraction-static": "--gpu-memory-utilization",
    "chunked-prefill-size": "--max-num-batched-tokens",
    "max-batch-prefill-tokens": "--max-num-batched-tokens",
    "schedule-policy": "--scheduling-policy",
    "max-running-requests": "--max-num-seqs",
    "parallel": "--max-num-seqs",
    "max-batch-size": "--max-num-seqs",
    "max-queued-requests": "--max-num-queued-reqs",
    "max-concurrent-requests": "--max-num-queued-reqs",
    "page-size": "--block-size",
    "ctx-size": "--max-model-len",
    "context-length": "--max-model-len",
    "max-total-tokens": "--max-model-len",
    "max-input-tokens": "--max-model-len",
    "cache-type-k": "--kv-cache-dtype",
    "enable-fp32-lm-head": "--fp32-lm-head",
    "cache-type-v": "--kv-cache-dtype",
    "watchdog-timeout": "--hang-timeout",
    "graceful-termination-timeout": "--shutdown-timeout",
    "chat-template-file": "--chat-template",
    "alias": "--served-model-name",
    "ssl-key-file": "--ssl-keyfile",
    "ssl-cert-file": "--ssl-certfile",
    "cors-allow-origin": "--allowed-origins",
}


def explain(name: str) -> str:
    """What an option that is not one of Quire's stands for here; "" for one that nobody has.

    `name` is without leading dashes when it has two.
    """
    if name in REFUSED:
        return f"is not supported: {REFUSED[name]}"
    if name in ALWAYS:
        return f"is not an option: {ALWAYS[name]}"
    if name in PASSING:
        values, why = PASSING[name]
        return f"takes only {' or '.join(values)}: {why}"
    return f"is another server's: here it is {CALLED[name]}" if name in CALLED else ""


def passes(name: str, value: object) -> bool:
    """Whether an option of another server, with this value, asks for what is done anyway."""
    if name in ALWAYS:
        return value is True or value == "true"
    return name in PASSING and str(value) in PASSING[name][0]
