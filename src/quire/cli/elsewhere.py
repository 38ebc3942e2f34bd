"""Options of other servers: the Quire option to use instead, or the reason why there is none.

A user who migrates a command line gets one line about each change. Names of vLLM, SGLang, llama-server and TGI.
"""

from __future__ import annotations

# These would change what is served or how, so the start fails with the reason.
_ONE_PROCESS = "a model runs in one process"
_ADAPTERS = "adapters are not supported"
_TASK = "--task embed, classify or score says what a model is for beside text"
_CHECKPOINT = "it is part of the checkpoint"
_HUB = "huggingface_hub manages the files of the hub: set the environment variable {}"
_STRUCTURED = "llguidance enforces every grammar"
_GRAMMAR = "requests set their own grammar; quire generate and quire chat have --{}"
_REQUEST = "requests set their own parameters, and the checkpoint's generation_config.json the defaults"
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
    "hf-file": "append it to the model's name: organisation/name:file.gguf",
    "revision": "pass the folder of the downloaded revision as the model",
    "chat-template-content-format": "the format is detected from the template",
    "prefix-caching-hash-algo": "prefixes are found in a tree of tokens, not by hashes",
    "enable-expert-parallel": _ONE_PROCESS,
    "enable-lora": _ADAPTERS,
    "lora-modules": _ADAPTERS,
    "max-loras": _ADAPTERS,
    "lora": _ADAPTERS,
    "spec-type": "--speculate names the method",
    "kv-transfer-config": "the KV cache stays in the engine",
    "kv-events-config": "the KV cache stays in the engine",
    "slot-save-path": "the KV cache stays in the engine",
    "reasoning-budget": "requests set thinking_token_budget",
    "tool-parser-plugin": "formats of tool calls are data of Quire",
    "reasoning-parser-plugin": "formats of reasoning are data of Quire",
    "allowed-media-domains": "images and other media are not accepted, and no URL is ever fetched",
    "limit-mm-per-prompt": "images and other media are not accepted",
    "models-dir": "a server serves one model",
    "embedding": _TASK,
    "embeddings": _TASK,
    "grammar": _GRAMMAR.format("grammar"),
    "grammar-file": _GRAMMAR.format("grammar"),
    "json-schema": _GRAMMAR.format("json-schema"),
    "json-schema-file": _GRAMMAR.format("json-schema"),
    "-j": _GRAMMAR.format("json-schema"),
    "override-generation-config": _REQUEST,
    "default-chat-template-kwargs": _REQUEST,
    "temp": _REQUEST,
    "n-predict": "requests set max_tokens themselves; quire generate has --max-tokens",
    "-n": "requests set max_tokens themselves; quire generate has --max-tokens",
    "-p": "it is the prompt of quire generate; use --port for the port of quire serve",
    "max-logprobs": "the maximum is 20 in a chat and 64 in a completion",
    "allow-credentials": "keys are sent in a header, never in cookies",
    "allowed-methods": "only the methods of the routes are allowed",
    "allowed-headers": "only the headers that the routes read are allowed",
    "root-path": "remove the prefix in a proxy in front of the server",
    "middleware": "the server loads no external code",
    "ssl-ca-certs": "client certificates are not checked",
    "ssl-cert-reqs": "client certificates are not checked",
}
# Switches for things that Quire always does: they are accepted and change nothing.
ALWAYS: dict[str, str] = {
    "enable-prompt-tokens-details": "usage always includes the cached tokens",
    "enable-cache-report": "usage always includes the cached tokens",
    "enable-auto-tool-choice": "the model may call tools whenever a request has some",
    "enable-metrics": "/metrics is always available",
    "metrics": "/metrics is always available",
    "enable-deterministic-inference": "one request gives the same bits whatever else runs",
    "enforce-eager": "steps are never captured as graphs",
    "disable-cuda-graph": "steps are never captured as graphs",
    "disable-log-requests": "requests are logged with --access-log only",
    "no-enable-log-requests": "requests are logged with --access-log only",
    "disable-uvicorn-access-log": "requests are logged with --access-log only",
    "disable-log-stats": "statistics are at /metrics, not in the log",
    "disable-custom-all-reduce": _ONE_PROCESS,
    "cont-batching": "batching is continuous by default (--batching)",
    "-cb": "batching is continuous by default (--batching)",
    "jinja": "templates are always rendered",
    "enable-per-request-metrics": "a request turns them on with `timings`",
}
_BACKENDS = tuple(f'{{"backend":{gap}"{name}"}}' for name in ("auto", "guidance") for gap in ("", " "))
# The same with values: those that Quire always uses, and why others are refused.
PASSING: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor-parallel-size": (("1",), _ONE_PROCESS),
    "pipeline-parallel-size": (("1",), _ONE_PROCESS),
    "-tp": (("1",), _ONE_PROCESS),
    "-pp": (("1",), _ONE_PROCESS),
    "tp-size": (("1",), _ONE_PROCESS),
    "tp": (("1",), _ONE_PROCESS),
    "num-shard": (("1",), _ONE_PROCESS),
    "data-parallel-size": (("1",), "start several servers behind a load balancer"),
    "-dp": (("1",), "start several servers behind a load balancer"),
    "n-gpu-layers": (("0",), "the native kernels run on the CPU"),
    "gpu-layers": (("0",), "the native kernels run on the CPU"),
    "-ngl": (("0",), "the native kernels run on the CPU"),
    "flash-attn": (("on", "auto", "1"), "attention never stores the score matrix"),
    "-fa": (("on", "auto", "1"), "attention never stores the score matrix"),
    "swap-space": (("0",), "preempted sequences are recomputed, not swapped"),
    "cpu-offload-gb": (("0",), "the weights are in main memory anyway"),
    "tokenizer-mode": (("auto",), _CHECKPOINT),
    "config-format": (("auto", "hf"), _CHECKPOINT),
    "generation-config": (("auto",), _REQUEST),
    "runner": (("auto", "generate"), _TASK),
    "convert": (("auto", "none"), _TASK),
    "preemption-mode": (("recompute",), "preempted sequences are recomputed"),
    "response-role": (("assistant",), "answers always have the role assistant"),
    "guided-decoding-backend": (("auto", "guidance"), _STRUCTURED),
    "structured-outputs-config.backend": (("auto", "guidance"), _STRUCTURED),
    "structured-outputs-config": (_BACKENDS, _STRUCTURED),
    "grammar-backend": (("llguidance",), _STRUCTURED),
}
# Options with another name in Quire.
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
    """Explain an option that Quire does not have; "" if no known server has it.

    `name` has no leading dashes if the option has two.
    """
    if name in REFUSED:
        return f"is not supported: {REFUSED[name]}"
    if name in ALWAYS:
        return f"is not an option: {ALWAYS[name]}"
    if name in PASSING:
        values, why = PASSING[name]
        return f"takes only {' or '.join(values)}: {why}"
    return f"is an option of another server: use {CALLED[name]}" if name in CALLED else ""


def passes(name: str, value: object) -> bool:
    """Whether an option of another server, with this value, is what Quire always does."""
    if name in ALWAYS:
        return value is True or value == "true"
    return name in PASSING and str(value) in PASSING[name][0]
