"""Options of other servers that Quire has not: what each is called here, or why there is none.

Somebody who moves a command line over learns in one line what to change. Names of vLLM, SGLang, llama-server and TGI.
"""

from __future__ import annotations

# Would change what is served or how, so the start stops and says why.
_ONE_PROCESS = "one process computes a model"
_ADAPTERS = "adapters are not supported"
_TOOLS = "tool calls are not parsed"
_CHECKPOINT = "it is part of the checkpoint"
REFUSED: dict[str, str] = {
    "trust-remote-code": "code in checkpoints is never run",
    "tokenizer": _CHECKPOINT,
    "revision": "give the folder of the revision that was downloaded",
    "chat-template-content-format": "the template itself shows which form it takes",
    "prefix-caching-hash-algo": "prefixes are found in a tree of tokens, not by hashes",
    "tensor-parallel-size": _ONE_PROCESS,
    "pipeline-parallel-size": _ONE_PROCESS,
    "enable-expert-parallel": _ONE_PROCESS,
    "data-parallel-size": "start several servers behind a balancer",
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
    "models-dir": "a server serves one model",
}
# What is done anyway: nothing to ask for.
ALWAYS: dict[str, str] = {
    "enable-prompt-tokens-details": "usage always tells the cached tokens",
    "enable-cache-report": "usage always tells the cached tokens",
    "enable-metrics": "/metrics is always there",
    "metrics": "/metrics is always there",
    "enable-deterministic-inference": "one request gives the same bits whatever else runs",
    "jinja": "templates are always rendered",
    "enable-per-request-metrics": "a request asks for its own with `timings`",
}
# The same under another name.
CALLED: dict[str, str] = {
    "model-path": "the model comes first: quire serve MODEL",
    "model-id": "the model comes first: quire serve MODEL",
    "hf-repo": "the model comes first: quire serve MODEL",
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
    """What an option that is not one of Quire's stands for here; "" for one that nobody has. `name` without dashes."""
    if name in REFUSED:
        return f"is not supported: {REFUSED[name]}"
    if name in ALWAYS:
        return f"is not an option: {ALWAYS[name]}"
    return f"is another server's: {CALLED[name]}" if name in CALLED else ""
