"""The options of other servers: one table.

A row has the names of an option, the servers that have it, and what it means here. Options with the same name and
values as in Quire need no row. Options that only tune what Quire does not have (graphs, GPUs) are `lacks`.
"""

from __future__ import annotations

from quire.config.elsewhere.foreign import (
    LCPP,
    OLM,
    SGLANG,
    TGI,
    VLLM,
    ForeignOption,
    address,
    always,
    by_hand,
    called,
    embedding,
    from_json_list,
    guessed_tokens,
    in_blocks,
    in_chunks,
    in_gibibytes,
    lacks,
    listed,
    master,
    needs,
    only,
    or_zero,
    reranking,
    spelled_out,
    switched,
)

_V, _S, _L, _T, _O = (VLLM,), (SGLANG,), (LCPP,), (TGI,), (OLM,)
_VS, _VST = (VLLM, SGLANG), (VLLM, SGLANG, TGI)
_ALL = (VLLM, SGLANG, LCPP, TGI)

_SHARED = "ranks of one host read each other's rows in memory that they share"
_ADAPTERS = (
    "an adapter is a model name of its own here (--lora-modules NAME=PATH), or part of the weights after "
    "quire convert --merge-adapter"
)
_NO_VECTORS = "control vectors are not supported"
_CHECKPOINT = "it is part of the checkpoint; change it there"
_HUB = "huggingface_hub manages the files of the hub: set the environment variable {}"
_REVISION = "pass the folder of the downloaded revision as the model"
_STRUCTURED = "llguidance enforces every grammar"
_GRAMMAR = "requests set their own grammar; quire generate and quire chat have --{}"
_REQUEST = "requests set their own parameters, and the checkpoint's generation_config.json the defaults"
_LENGTH = "requests set max_tokens themselves; quire generate has --max-tokens"
_MEDIA = "images and other media are not accepted, and no URL is ever fetched"
_TASK = "--task embed, classify or score says what a model is for"
_POOLED = "--pooling says which hidden states are the vector"
_CACHE = "the KV cache stays in the engine, and its blocks in main memory"
_CPU = "the native kernels run on the CPU"
_GRAPHS = "steps are never captured as graphs"
_EXPERTS = "--enable-expert-parallel spreads experts over the ranks that split a layer, of all replicas"
_EPLB = (
    "experts change ranks by their load, and busy ones are copied where that helps; nothing is to be chosen"
)
_FORMATS = "formats of {} are data of Quire"
_LOGGED = "requests are logged with --access-log only"
_CERTIFICATES = "client certificates are not checked; do it in a proxy in front of the server"
_ROUTES = "the routes of the server are fixed"
_NO_CODE = "the server loads no external code"
_READ = "safetensors and GGUF files are read directly"
_TOKENIZING = "texts are tokenized on threads of their own"
_KERNELS = "all attention is in Quire's own kernels"
_METRICS = "/metrics has what there is"
_INSIDE = "what happens inside of the model is not shown"
_AHEAD = "the next step is prepared while one runs"
_WINDOWS = "the checkpoint says which layers have windows"
_SETTINGS = "--speculative-config sets the method and its settings; answers are the same without"
_RANK = (
    "--nnodes, --node-rank and --master-addr spread the ranks of a model over hosts, each with this command"
)
_MAPPED = "packed weights are memory-mapped from the weight cache (--weight-cache)"
_SWAP = "a part of --memory"
_CACHED = "usage always includes the cached tokens"
_PAGES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "q4_0": "int4"}
_INT8 = "int8 has one scale per token and head, int4 one per 32 numbers; the other formats are not there"
_FP8 = "other formats of that server are not there"
_SCALES = "quire calibrate finds the scales of an fp8 cache, and --kv-cache-scales takes its file"
_BACKENDS = tuple(f'{{"backend":{gap}"{name}"}}' for name in ("auto", "guidance") for gap in ("", " "))
_PENALTIES = "repeat-penalty repeat-last-n presence-penalty frequency-penalty"
_SAMPLERS = (
    "dry-multiplier dry-base dry-allowed-length dry-penalty-last-n dry-sequence-breaker xtc-probability"
)


def _long(names: str) -> str:
    return " ".join(f"--{name}" for name in names.split())


ROWS: tuple[ForeignOption, ...] = (
    # ---- the model
    called("--model-path", _S, "--model"),
    called("--model-id", _T, "--model"),
    called("--hf-repo -hfr", _L, "--model"),
    needs("--hf-file -hff", _L, "append it to the model's name: organisation/name:file.gguf"),
    needs("--model-url -mu --docker-repo -dr", _L, "download the file, and pass its path as the model"),
    lacks("--hf-token -hft", (VLLM, LCPP), _HUB.format("HF_TOKEN"), arity="?"),
    lacks("--download-dir --huggingface-hub-cache --weights-cache-override", _VST, _HUB.format("HF_HUB_CACHE")),
    lacks("--offline", _L, _HUB.format("HF_HUB_OFFLINE=1"), arity=""),
    needs("--revision --code-revision --tokenizer-revision", _VST, _REVISION),
    lacks("--trust-remote-code", _VST, "code in checkpoints is never run; a model that needs it is refused", arity=""),
    needs("--tokenizer --tokenizer-path", _VS, _CHECKPOINT),
    only("--tokenizer-mode", _VS, "auto", _CHECKPOINT, essential=True),
    lacks("--skip-tokenizer-init", _VS, "requests may send token ids with a tokenizer as well", arity=""),
    needs("--hf-config-path --hf-overrides --json-model-override-args --override-kv", _ALL, _CHECKPOINT),
    only("--config-format", _V, "auto hf", _CHECKPOINT),
    needs("--rope-scaling --rope-theta --rope-factor", _VST, _CHECKPOINT),
    needs(_long("rope-scale rope-freq-base rope-freq-scale yarn-orig-ctx yarn-ext-factor yarn-attn-factor "
                "yarn-beta-slow yarn-beta-fast"), _L, _CHECKPOINT),
    only("--model-impl", _VS, "auto vllm sglang", "all models run on Quire's own kernels"),
    called("--quantize", _T, "--quantization", values={
        "awq": "awq", "gptq": "gptq", "marlin": "gptq", "compressed-tensors": "compressed-tensors", "eetq": "int8",
        "bitsandbytes": "int8", "bitsandbytes-nf4": "int4", "bitsandbytes-fp4": "int4",
    }, why="weights are rounded at load to int8 or int4"),
    switched("--enable-fp32-lm-head", _S, "--fp32-lm-head"),
    lacks("--check-tensors", _L, "quire verify checks a model's files", arity=""),
    lacks("--mlock --no-mmap --mmap --direct-io -dio --repack -nr --no-repack", _L, _MAPPED, arity=""),
    lacks("--load-mode -lm --lazy-mode -lzm", _L, _MAPPED),
    lacks("--model-loader-extra-config", _VS, _READ),
    lacks("--safetensors-load-strategy --pt-load-map-location --ignore-patterns --max-parallel-loading-workers", _V,
          _READ),
    lacks("--use-tqdm-on-load --no-use-tqdm-on-load", _V, _READ, arity=""),
    lacks("--delete-ckpt-after-loading", _S, "files of models are kept", arity=""),
    needs("--torchao-config", _S, "--quantization int8 or int4 rounds the weights at load"),
    lacks("--weight-version", _S, "the version of a model is the hash of its configuration"),
    needs("--worker-cls --worker-extension-cls --scheduler-cls --io-processor-plugin", _V, _NO_CODE),
    needs("--gpt-oss-20b-default --gpt-oss-120b-default --embd-gemma-default --fim-qwen-1.5b-default "
          "--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default",
          _L, "name the model", arity=""),
    always("--warmup --no-warmup --skip-server-warmup", (LCPP, SGLANG), "the first request is as fast as the next"),
    # ---- context, memory, how much runs at once
    called("--ctx-size", _L, "--max-model-len", done=("0",), why="there -np slots may share it, here it is of each"),
    called("-c", _L, "--max-model-len", done=("0",), why="there -np slots may share it, here it is of each"),
    called("--context-length", _S, "--max-model-len"),
    called("--max-model-len", _V, "--max-model-len", done=("auto", "-1")),
    called("--max-total-tokens", _T, "--max-model-len"),
    lacks("--max-total-tokens", _S, "--num-kv-blocks sets the size of the KV cache, in blocks of --block-size tokens"),
    lacks("--max-input-tokens --max-input-length", _T, "prompt and answer share --max-model-len"),
    called("--max-batch-total-tokens", _T, "--num-kv-blocks", convert=in_blocks, why="blocks of 16 tokens"),
    called("--num-gpu-blocks-override", _V, "--num-kv-blocks"),
    lacks("--kv-cache-memory-bytes", _V, "--memory bounds all memory, --num-kv-blocks the KV cache"),
    called("--mem-fraction-static", _S, "--gpu-memory-utilization", why="of the available main memory"),
    called("--cuda-memory-fraction", _T, "--gpu-memory-utilization", why="of the available main memory"),
    called("--swap-space", _V, "--swap-space", convert=in_gibibytes, done=("0",), why=_SWAP),
    only("--cpu-offload-gb", _VS, "0", "the weights are in main memory anyway"),
    only("--preemption-mode", _V, "recompute", "with --swap-space a sequence is swapped where that is faster"),
    called("--max-running-requests", _S, "--max-num-seqs"),
    called("--parallel", _L, "--max-num-seqs", done=("-1",)),
    called("-np", _L, "--max-num-seqs", done=("-1",)),
    called("--max-batch-size", _T, "--max-num-seqs"),
    called("--max-queued-requests", _S, "--max-num-queued-reqs"),
    called("--max-concurrent-requests", _T, "--max-num-queued-reqs", why="running requests do not count"),
    called("--chunked-prefill-size", _S, "--max-num-batched-tokens", convert=in_chunks),
    called("--max-batch-prefill-tokens", _T, "--max-num-batched-tokens"),
    called("--batch-size -b", _L, "--max-num-batched-tokens"),
    lacks("--ubatch-size -ub", _L, "the kernels divide a step themselves; --max-num-batched-tokens bounds it"),
    lacks("--max-prefill-tokens --prefill-max-requests", _S, "--max-num-batched-tokens bounds a step"),
    lacks("--waiting-served-ratio --max-waiting-tokens", _T, "a request joins the next step with room for it"),
    lacks("--validation-workers", _T, _TOKENIZING),
    lacks("--renderer-num-workers --tokenizer-worker-num --tokenizer-pool-size", _VS, _TOKENIZING),
    lacks("--api-server-count", _V, "one process answers HTTP"),
    lacks("--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold", _V,
          "prompts share a step's tokens in the order of arrival"),
    lacks("--schedule-conservativeness", _S, "a sequence that finds no block is preempted and recomputed"),
    called("--schedule-policy", _S, "--scheduling-policy", values={"fcfs": "fcfs", "lpm": "lpm"},
           why="priority has higher numbers first there, lower ones here"),
    needs("--enable-priority-scheduling --schedule-low-priority-values-first", _S,
          "--scheduling-policy priority runs lower numbers first", arity=""),
    always("--async-scheduling --no-async-scheduling", _V, _AHEAD),
    lacks("--disable-overlap-schedule", _S, _AHEAD, arity=""),
    only("--num-continuous-decode-steps", _S, "1", "every step is scheduled"),
    always("--enable-mixed-chunk", _S, "prompts and answers share steps"),
    lacks("--keep", _L, "nothing is discarded from a context, so all of a prompt is kept"),
    needs("--allow-auto-truncate", _S, "prompts are never truncated", arity=""),
    always("--cont-batching -cb", _L, "batching is continuous by default (--batching)"),
    lacks("--no-cont-batching -nocb", _L, "--batching dynamic collects batches, and is never faster", arity=""),
    needs("--context-shift", _L, "a context is never shifted: an answer ends at --max-model-len", arity=""),
    always("--no-context-shift", _L, "a context is never shifted"),
    always("--kv-unified -kvu", _L, "all sequences share the KV blocks"),
    lacks("--no-kv-unified -no-kvu", _L, "all sequences share the KV blocks", arity=""),
    only("--fit -fit", _L, "on", "what does not fit into --memory is refused; the context is fitted if not given"),
    lacks("--fit-target -fitt --fit-ctx -fitc", _L, "--memory bounds all memory"),
    # ---- the KV cache
    called("--page-size", _S, "--block-size", done=("1",), why="a multiple of 16"),
    called("--cache-type-k -ctk --cache-type-v -ctv", _L, "--kv-cache-dtype", values=_PAGES, why=_INT8),
    called("--kv-cache-dtype", _VST, "--kv-cache-dtype", why=_FP8, values={
        name: name
        for name in (
            "auto", "float32", "bfloat16", "bf16", "float16", "half", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"
        )
    } | {"fp8_e4m3fn": "fp8_e4m3"}),
    lacks("--calculate-kv-scales", _V, _SCALES, arity=""),
    lacks("--quantization-param-path", _VS, _SCALES),
    switched("--disable-radix-cache", _S, "--no-enable-prefix-caching"),
    switched("--no-cache-prompt", _L, "--no-enable-prefix-caching"),
    switched("--cache-prompt", _L, "--enable-prefix-caching"),
    only("--prefix-caching-hash-algo", _V, "builtin sha256 sha256_cbor xxhash xxhash_cbor",
         "prefixes are found in a tree of tokens, not by hashes"),
    only("--cache-reuse", _L, "0", "only prefixes are reused: keys that are shifted would give other answers"),
    lacks("--cache-ram -cram --ctx-checkpoints -ctxcp --swa-checkpoints --checkpoint-min-step -cms", _L,
          "cached prefixes share the KV blocks with running sequences (--num-kv-blocks)"),
    lacks("--cache-idle-slots --no-cache-idle-slots --swa-full --defrag-thold -dt", _L, _CACHE, arity="?"),
    needs("--slot-save-path", _L, _CACHE),
    called("--kv-transfer-config --disaggregation-mode", _VS, "--kv-tiers", convert=by_hand, essential=True,
           why="remote=HOST:PORT:KEYFILE,role=prefill or role=decode"),
    lacks("--enable-hierarchical-cache", _S, "--swap-space keeps KV blocks that had to give way", arity=""),
    called("--kv-offloading-size", _V, "--swap-space", convert=in_gibibytes, why=_SWAP),
    called("--hicache-size", _S, "--swap-space", convert=in_gibibytes, done=("0",), why=_SWAP),
    lacks("--kv-offloading-backend --hicache-ratio", _VS, "--swap-space sets the size of the room for swapped blocks"),
    lacks("--disable-cascade-attn --kv-sharing-fast-prefill --disable-hybrid-kv-cache-manager", _V, _KERNELS, arity=""),
    lacks("--prefill-only-disable-kv-cache", _S, _CACHE, arity=""),
    needs("--disable-sliding-window", _V, _WINDOWS, arity=""),
    only("--mamba-cache-dtype --mamba-ssm-cache-dtype", _V, "auto", "states have a number format of their own"),
    lacks("--mamba-block-size", _V, "states have a place of their own"),
    lacks("--slot-prompt-similarity -sps", _L, "there are no slots: equal prefixes are always shared"),
    only("--radix-eviction-policy", _S, "lru", "the least recently used blocks are evicted first"),
    # ---- one process, the CPU
    called("-tp --tp-size --tp", _VS, "--tensor-parallel-size"),
    called("-pp --pp-size", _VS, "--pipeline-parallel-size"),
    called("--num-shard", _T, "--tensor-parallel-size"),
    lacks("--sharded", _T, "--tensor-parallel-size says how many ranks share a model"),
    called("-dp --dp-size --dp", _VS, "--data-parallel-size"),
    switched("--enable-ep-moe", _S, "--enable-expert-parallel"),
    always("--enable-eplb", _VS, "ranks that hold whole experts exchange them by their load"),
    lacks("--eplb-config", _V, _EPLB),
    lacks("--eplb-algorithm --init-expert-location --eplb-rebalance-num-iterations", _S, _EPLB),
    only("--ep-num-redundant-experts", _S, "0", _EPLB),
    lacks("--enable-dp-attention", _VS, _EXPERTS, arity=""),
    only("--expert-parallel-size --ep-size --ep", _VS, "1", _EXPERTS),
    lacks("--data-parallel-rank --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port "
          "--data-parallel-start-rank --load-balance-method", _VS, "replicas are parts of one server, which chooses"),
    only("--data-parallel-backend", _V, "mp", _RANK),
    lacks("--data-parallel-hybrid-lb --data-parallel-external-lb --headless --enable-p2p-check", _VS, _RANK, arity=""),
    called("--dist-init-addr", _S, "--master-addr", convert=master),
    lacks("--nccl-port --shard-uds-path --master-shard-uds-path", _VST, _RANK),
    called("--distributed-executor-backend", _V, "--launcher", values={"ray": "ray"}, done=("uni", "mp"), why=_RANK),
    always("--disable-custom-all-reduce --disable-custom-kernels", (VLLM, SGLANG, TGI), _SHARED),
    only("--n-gpu-layers --gpu-layers -ngl", _L, "0", _CPU),
    only("--device", _S, "cpu", _CPU),
    only("--device -dev", _L, "none", _CPU),
    lacks("--split-mode -sm --tensor-split -ts --main-gpu -mg --override-tensor -ot --n-cpu-moe -ncmoe --rpc", _L,
          _CPU),
    always("--cpu-moe -cmoe --no-kv-offload -nkvo --no-op-offload --no-mmproj-offload", _L, _CPU),
    lacks("--kv-offload -kvo --op-offload", _L, _CPU, arity=""),
    called("-t", _L, "--threads", done=("-1",)),
    called("--threads-batch -tb", _L, "--threads", why="prompts and decoding use the same threads"),
    lacks("--threads-http --prio --prio-batch --poll --poll-batch --cpu-mask -C --cpu-range -Cr --cpu-strict --numa",
          _L, "each thread keeps to a processor of its own; taskset and numactl choose which"),
    only("--attention-backend", _VS, "auto native", _KERNELS),
    only("--sampling-backend", _S, "auto", "there is one sampler"),
    lacks("--triton-attention-num-kv-splits --kt-weight-path --kt-method --kt-cpuinfer "
          "--kt-threadpool-count", _S, _CPU),
    lacks("--backend-sampling -bs --no-host", _L, _CPU, arity=""),
    only("--flash-attn -fa", _L, "on auto 1", "attention never stores the score matrix", arity="?"),
    always("--enforce-eager --disable-cuda-graph --disable-cuda-graph-padding", _VS, _GRAPHS),
    lacks("--compilation-config -O --cuda-graphs --cuda-graph-max-bs --cuda-graph-bs --max-seq-len-to-capture "
          "--optimization-level --performance-mode", _VST, _GRAPHS),
    lacks("--enable-torch-compile", _S, _GRAPHS, arity=""),
    always("--enable-deterministic-inference", _S, "one request gives the same bits whatever else runs"),
    # ---- answers
    called("--chat-template-file", _L, "--chat-template"),
    called("--chat-template", _L, "--chat-template", convert=spelled_out, essential=True),
    only("--chat-template-content-format", _V, "auto", "the format is detected from the template"),
    always("--jinja", _L, "templates are always rendered"),
    needs("--no-jinja", _L, "templates are always rendered", arity=""),
    needs("--default-chat-template-kwargs --chat-template-kwargs", (VLLM, LCPP),
          "requests set chat_template_kwargs; or change the default in the template (--chat-template)"),
    only("--stream-interval", _VS, "1", "every token is sent when it is there"),
    needs("--stream-output", _S, "events of /generate have the whole text so far", arity=""),
    needs("--return-tokens-as-token-ids", _V, "requests set return_tokens_as_token_ids", arity=""),
    only("--logprobs-mode", _V, "raw_logprobs", "logprobs are those of the model's logits", essential=True),
    needs("--exclude-tools-when-tool-choice-none", _V, "leave the tools out of the request", arity=""),
    needs("--enable-return-routed-experts --enable-return-hidden-states", _VS, _INSIDE, arity=""),
    needs("--enable-custom-logit-processor", _S, _NO_CODE, arity=""),
    needs("--special -sp", _L, "requests set skip_special_tokens", arity=""),
    needs("--ignore-eos", _L, _REQUEST, arity=""),
    needs("--prefill-assistant", _L, "requests set continue_final_message", arity=""),
    always("--no-prefill-assistant", _L, "requests set continue_final_message"),
    needs("--spm-infill", _L, "the tokens of the model say in which order prefix and suffix are", arity=""),
    lacks("--escape -e --no-escape --verbose-prompt --simple-io", _L, "prompts come in requests", arity=""),
    needs("--watermark-gamma --watermark-delta", _T, _REQUEST),
    lacks("--disable-grammar-support", _T, _STRUCTURED, arity=""),
    always("--enable-prefill-logprobs", _T, "requests ask for them"),
    only("--response-role", _V, "assistant", "answers always have the role assistant"),
    always("--enable-auto-tool-choice", _V, "the model may call tools whenever a request has some"),
    needs("--tool-parser-plugin", _V, _FORMATS.format("tool calls")),
    needs("--reasoning-parser-plugin", _V, _FORMATS.format("reasoning")),
    called("--mcp-servers-config", _L, "--mcp", why="it names the tools that may be called: \"tools\" of each server"),
    needs("--mcp-servers-json", _L, "write it to a file, which --mcp names"),
    needs("--tool-server", _V, "--mcp names a file of tool servers, which speak over pipes or streamable HTTP"),
    needs("--tools --tools-runtime", _L, "the server runs no tools; clients do"),
    only("--reasoning-format", _L, "auto deepseek", "reasoning is in reasoning_content; --reasoning-parser names it"),
    only("--reasoning-budget", _L, "-1", "requests set thinking_token_budget", essential=True),
    only("--reasoning -rea", _L, "auto", "requests set enable_thinking in chat_template_kwargs", essential=True),
    only("--generation-config", _V, "auto", _REQUEST, essential=True),
    needs("--override-generation-config --preferred-sampling-params", _VS, _REQUEST),
    only("--sampling-defaults", _S, "model", _REQUEST, essential=True),
    needs(_long(f"temp temperature top-k top-p min-p typical typical-p top-nsigma top-n-sigma {_PENALTIES} {_SAMPLERS} "
                "xtc-threshold dynatemp-range dynatemp-exp mirostat mirostat-lr mirostat-ent samplers sampler-seq "
                "logit-bias adaptive-target adaptive-decay"), _L, _REQUEST),
    needs("--n-predict --predict -n", _L, _LENGTH),
    needs("--prompt -p", _L, "it is the prompt of quire generate; --port is the port of quire serve"),
    called("-p", _T, "--port"),
    needs("--grammar", _L, _GRAMMAR.format("grammar")),
    needs("--grammar-file", _L, _GRAMMAR.format("grammar")),
    needs("--json-schema -j --json-schema-file -jf", _L, _GRAMMAR.format("json-schema")),
    only("--guided-decoding-backend --structured-outputs-config.backend", _V, "auto guidance", _STRUCTURED),
    lacks("--structured-outputs-config", _V, _STRUCTURED, done=_BACKENDS),
    only("--grammar-backend", _S, "llguidance", _STRUCTURED),
    lacks("--max-logprobs", _V, "the maximum is 20 in a chat and 64 in a completion"),
    lacks("--max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size", _T,
          "limits of a request are in docs/server.md"),
    needs("--logits-processors --logits-processor-pattern", _V, _NO_CODE),
    called("--random-seed", _S, "--seed"),
    called("--seed -s", _L, "--seed", done=("-1",)),
    # ---- adapters, media, other tasks
    called("--lora-paths", _S, "--lora-modules", arity="+"),
    needs("--lora --lora-scaled --lora-adapters", (LCPP, TGI), _ADAPTERS),
    always("--lora-init-without-apply", _L, _ADAPTERS),
    needs("--control-vector --control-vector-scaled", _L, _NO_VECTORS),
    called("--max-loras-per-batch", _S, "--max-loras"),
    needs("--mmproj -mm --mmproj-url -mmu --media-path --allowed-media-domains --allowed-local-media-path",
          (LCPP, VLLM), _MEDIA),
    lacks("--limit-mm-per-prompt --mm-processor-kwargs --image-max-tokens --image-min-tokens", (VLLM, LCPP), _MEDIA),
    always("--no-mmproj --no-mmproj-auto --language-model-only", (LCPP, VLLM), _MEDIA),
    lacks("--video-pruning-rate --mm-processor-cache-gb --mm-encoder-tp-mode --mm-processor-cache-type", _V, _MEDIA),
    lacks("--skip-mm-profiling --interleave-mm-strings", _V, _MEDIA, arity=""),
    needs("--enable-multimodal", _S, _MEDIA, arity=""),
    only("--runner", _V, "auto generate", _TASK, essential=True),
    called("--convert", _V, "--task", done=("auto", "none")),
    called("--embedding --embeddings --is-embedding", (LCPP, SGLANG), "--task", arity="", convert=embedding),
    called("--rerank --reranking", _L, "--task", arity="", convert=reranking),
    needs("--pooler-config --override-pooler-config", _V, _POOLED),
    called("--models-dir", _L, "--models-dir"),
    called("--models-max", _L, "--models-max"),
    always("--models-autoload", _L, "a model is loaded when a request names it"),
    needs("--no-models-autoload", _L, "a model is loaded when a request names it", arity=""),
    lacks("--tags", _L, "models have no tags"),
    needs("--models-preset", _L, "a TOML file of --models has the options of each model"),
    # ---- speculation
    called("--model-draft -md --spec-draft-model", _L, "--draft-model"),
    called("--speculative-draft-model-path --speculative-draft-model", _S, "--draft-model"),
    called("--spec-type", _L, "--speculate", done=("none",), why=_SETTINGS, values=dict.fromkeys(
        ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram")),
    called("--speculative-algorithm", _S, "--speculate", values={"NGRAM": "ngram"}, why=_SETTINGS,
           done=("STANDALONE",)),
    called("--speculate", _T, "--speculative-config", convert=guessed_tokens, done=("0",)),
    lacks("--draft-max --draft-min --draft --draft-n --draft-p-min --spec-draft-n-max --spec-draft-n-min "
          "--speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens --gpu-layers-draft -ngld "
          "--ctx-size-draft -cd --cache-type-k-draft -ctkd --cache-type-v-draft -ctvd", (LCPP, SGLANG), _SETTINGS),
    # ---- address and access
    called("--hostname", _T, "--host"),
    called("--api-keys", _V, "--api-key"),
    called("--api-key", _L, "--api-key", convert=listed),
    called("--alias -a", _L, "--served-model-name", convert=listed),
    called("--ssl-key-file", _L, "--ssl-keyfile"),
    called("--ssl-cert-file", _L, "--ssl-certfile"),
    needs("--ssl-ca-certs --ssl-cert-reqs", _VS, _CERTIFICATES),
    always("--enable-ssl-refresh", _VS, "SIGHUP reloads both files"),
    called("--allowed-origins", _V, "--allowed-origins", convert=from_json_list),
    called("--cors-allow-origin", _T, "--allowed-origins"),
    called("--cors-origins", _L, "--allowed-origins", convert=listed),
    lacks("--allow-credentials", _V, "keys are sent in a header, never in cookies", arity=""),
    lacks("--allowed-methods --cors-methods", (VLLM, LCPP), "only the methods of the routes are allowed"),
    lacks("--allowed-headers --cors-headers", (VLLM, LCPP), "a listed origin may send any header"),
    needs("--root-path --fastapi-root-path --api-prefix", (VLLM, SGLANG, LCPP),
          "remove the prefix in a proxy in front of the server"),
    called("--payload-limit", _T, "--max-body-bytes"),
    lacks("--h11-max-header-count --h11-max-incomplete-event-size", _V, "the limits of headers are fixed"),
    always("--enable-server-load-tracking", _V, "/load is always there"),
    always("--enable-tokenizer-info-endpoint", _V, "/tokenizer_info is always there"),
    always("--enable-request-id-headers", _V, "every response has an x-request-id"),
    needs("--ngrok", _T, "publish the server with a proxy in front of it", arity=""),
    needs("--ngrok-authtoken --ngrok-edge", _T, "publish the server with a proxy in front of it"),
    needs("--tokenizer-config-path", _T, _CHECKPOINT),
    needs("--ui-mcp-proxy --webui-mcp-proxy", _L, "--mcp names tool servers", arity=""),
    needs("--middleware", _V, _NO_CODE),
    switched("--no-webui", _L, "--no-ui"),
    always("--webui", _L, "--no-ui turns the web page off"),
    lacks("--disable-fastapi-docs", _V, "--no-ui turns all pages off, /docs among them", arity=""),
    lacks("--path --webui-config --ui-config", _L, "the web page is part of the package"),
    lacks("--props", _L, _ROUTES, arity=""),
    lacks("--slots", _L, "/slots shows what all clients send: it is there with --admin-api-key", arity=""),
    always("--no-slots", _L, _ROUTES),
    called("--file-storage-path", _S, "--files-dir"),
    # ---- timeouts, supervision
    called("--watchdog-timeout", _S, "--hang-timeout"),
    lacks("--soft-watchdog-timeout", _S, "--hang-timeout is the one limit"),
    called("--graceful-termination-timeout", _T, "--shutdown-timeout"),
    called("--timeout -to", _L, "--reader-timeout", why="the time for which a client may leave output unread"),
    called("--sse-ping-interval", _L, "--sse-ping-interval", convert=or_zero),
    lacks("--sleep-idle-seconds", _L, "a server of several models has --keep-alive; one model stays"),
    always("--enable-sleep-mode", _V, "/sleep and /wake_up are there with --admin-api-key"),
    # ---- logs and metrics
    always("--enable-prompt-tokens-details --enable-cache-report", _VS, _CACHED),
    always("--enable-per-request-metrics", _V, "a request turns them on with `timings`"),
    always("--enable-metrics --metrics", (SGLANG, LCPP), "/metrics is always available"),
    always("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details", _V,
           _METRICS),
    lacks("--show-hidden-metrics-for-version --kv-cache-metrics-sample --decode-log-interval "
          "--gc-warning-threshold-secs", _VS, _METRICS),
    lacks("--collect-detailed-traces", _V, "the spans of a request always have its stages"),
    lacks("--enable-trace", _S, "--otlp-traces-endpoint turns spans on", arity=""),
    lacks("--profiler-config", _V, "--profile-dir is where profiles are written"),
    lacks("--enable-log-outputs --enable-log-deltas", _V, "no texts are logged", arity=""),
    needs("--prometheus-port", _T, "/metrics is a route of the server"),
    only("--usage-stats", _T, "off no-stack", "nothing is sent to anybody"),
    lacks("--env -e", _T, "quire doctor shows what a report needs", arity=""),
    always("--disable-log-stats", _V, "statistics are at /metrics, not in the log"),
    always("--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log", _V, _LOGGED),
    switched("--enable-log-requests --log-requests", _VS, "--access-log"),
    called("--uvicorn-log-level --log-level-http", _VS, "--log-level", values={
        "debug": "debug", "info": "info", "warning": "warning", "error": "error", "critical": "error", "trace": "debug",
    }),
    lacks("--log-requests-level --max-log-len", _VS, "--access-log writes a line per request, without its text"),
    called("--json-output", _T, "--log-format", arity="", values={"": "json", "true": "json"}),
    called("--log-jsonl", _L, "--log-format", arity="", values={"": "json"}),
    called("--otlp-endpoint", _T, "--otlp-traces-endpoint"),
    lacks("--otlp-service-name", _T, "the collector can name the service"),
    lacks("--crash-dump-folder", _S, "a request that ends the engine twice is refused, and the log says which"),
    lacks("--log-file", _L, "the log is on standard error; redirect it"),
    lacks("--log-colors --verbosity -lv --log-verbosity", _L, "--log-level sets what is logged"),
    lacks("--log-disable", _L, "--quiet writes only errors", arity=""),
    called("--verbose -v --log-verbose", _L, "--log-level", arity="", values={"": "debug"}),
    lacks("--log-prefix --log-timestamps --no-log-timestamps --perf --no-perf", _L, "--log-format sets the form",
          arity=""),
    # ---- environment variables
    called("VLLM_API_KEY LLAMA_API_KEY", (VLLM, LCPP), "--api-key", convert=listed),
    called("OLLAMA_HOST", _O, "--host", convert=address),
    called("OLLAMA_CONTEXT_LENGTH", _O, "--max-model-len", done=("0",)),
    called("OLLAMA_NUM_PARALLEL", _O, "--max-num-seqs", done=("0",)),
    called("OLLAMA_MAX_QUEUE", _O, "--max-num-queued-reqs"),
    called("OLLAMA_KV_CACHE_TYPE", _O, "--kv-cache-dtype", values=_PAGES, why=_INT8),
    called("OLLAMA_ORIGINS", _O, "--allowed-origins", convert=listed),
    called("OLLAMA_DEBUG", _O, "--log-level", done=("0", "false"), values=dict.fromkeys(("1", "true", "2"), "debug")),
    only("OLLAMA_FLASH_ATTENTION", _O, "1 true", "attention never stores the score matrix"),
    called("OLLAMA_MAX_LOADED_MODELS", _O, "--models-max"),
    only("OLLAMA_KEEP_ALIVE", _O, "-1", "a server keeps its model; one with several has --keep-alive in seconds"),
    needs("OLLAMA_MODELS", _O, "quire serve takes the path of a model; a GGUF file of Ollama is named by its digest"),
    lacks("OLLAMA_NOPRUNE OLLAMA_NOHISTORY OLLAMA_NO_CLOUD", _O, "there is nothing of this kind to turn off"),
    lacks("OLLAMA_LOAD_TIMEOUT", _O, "a server waits for its model to load"),
    lacks("OLLAMA_MULTIUSER_CACHE", _O, "prefixes are always shared in a tree of tokens"),
    lacks("OLLAMA_SCHED_SPREAD OLLAMA_GPU_OVERHEAD OLLAMA_LLM_LIBRARY OLLAMA_INTEL_GPU OLLAMA_VULKAN", _O, _CPU),
    lacks("CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", (*_ALL, OLM), _CPU),
)  # fmt: skip
