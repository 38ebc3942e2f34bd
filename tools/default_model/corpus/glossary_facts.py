"""Facts about LLM inference and serving, in short sentences.

`must` lists what a right answer mentions; "a|b" accepts either. Formulas are the corrected ones: TPOT is the mean of the
inter-token latencies of one request, weights take parameters times bytes, a sequence's KV cache counts key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A term: names it goes by, a one-sentence answer, one or two sentences more, words a right answer holds."""

    names: tuple[str, ...]
    short: str
    more: str
    must: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question that is not "what is …", with its wordings."""

    asks: tuple[str, ...]
    answer: str
    must: tuple[str, ...]


ENTRIES = (
    Entry(("TTFT", "time to first token"), "TTFT, time to first token, is the time from sending a request until the first output token arrives.", "It covers waiting in the queue, tokenizing and the prefill of the prompt. Long prompts and long queues make it worse.", ("first token",)),
    Entry(("TPOT", "time per output token"), "TPOT, time per output token, is the mean time between output tokens of one request after the first.", "It is the end-to-end latency minus TTFT, divided by the number of output tokens minus one.", ("output token", "mean|divided")),
    Entry(("ITL", "inter-token latency"), "ITL, inter-token latency, is the time between one output token and the next.", "The mean of the ITLs of one request is its TPOT. Single large gaps show as stutter in a stream.", ("between|next", "token")),
    Entry(("end-to-end latency", "E2EL"), "End-to-end latency is the time from sending a request until its last token.", "It is TTFT plus the time to generate the remaining tokens.", ("last token",)),
    Entry(("throughput",), "Throughput is how many tokens or requests a server finishes per second, over all users.", "Larger batches raise throughput but also make each token slower.", ("per second",)),
    Entry(("goodput",), "Goodput is the rate of requests that meet all of their latency targets.", "Raw throughput can be high while many requests are too slow, so goodput is the more honest number.", ("meet", "target")),
    Entry(("SLO", "service level objective"), "An SLO, service level objective, is a target for a measured quality, such as TTFT under 500 ms.", "It is usually set on a percentile, for example p95 or p99.", ("target",)),
    Entry(("p99", "p99 latency", "tail latency"), "The p99 latency is the value that 99 percent of requests stay below.", "One in a hundred requests is slower. A p99 far above the median points to a scheduling problem.", ("99",)),
    Entry(("prefill", "the prefill phase"), "Prefill is the phase that runs the whole prompt through the model at once and fills the KV cache.", "It works on many tokens in parallel, so it is bound by compute. It sets the TTFT.", ("prompt", "KV cache|compute")),
    Entry(("decode", "the decode phase"), "Decode is the phase that generates output tokens one at a time.", "Each step reads all weights and the KV cache for little arithmetic, so it is bound by memory bandwidth.", ("one at a time|one token", "memory bandwidth|output")),
    Entry(("the KV cache", "KV cache", "a KV cache"), "The KV cache keeps the keys and values of all past tokens so that they are not computed again at every step.", "It grows linearly with context length and with the number of running requests.", ("keys and values",)),
    Entry(("PagedAttention", "paged attention"), "PagedAttention stores the KV cache in fixed-size blocks that a block table maps, like virtual memory.", "Blocks are given out on demand, so at most part of one block per request is wasted, and requests can share blocks.", ("block",)),
    Entry(("a block table", "block table"), "A block table maps the positions of a sequence to the physical KV cache blocks that hold them.", "It lets blocks lie anywhere in memory, as a page table does for a process.", ("block", "map")),
    Entry(("fragmentation", "KV cache fragmentation"), "Fragmentation is KV memory that is reserved but not used.", "Reserving the longest possible context for each request wastes most of it. Paging removes nearly all of that waste.", ("not used|waste",)),
    Entry(("copy-on-write", "copy on write"), "Copy-on-write lets sequences share a KV block until one of them writes to it, and only then copies it.", "It helps when one prompt has several samples or beams.", ("share", "cop")),
    Entry(("static batching",), "Static batching runs a fixed batch until its longest request is done.", "Short requests wait for long ones, and finished slots stay empty.", ("longest",)),
    Entry(("continuous batching", "in-flight batching"), "Continuous batching decides at every step which requests run: new ones join and finished ones leave at once.", "It keeps the batch full when output lengths differ, which raises throughput a lot.", ("every step|join", "leave|finished")),
    Entry(("chunked prefill",), "Chunked prefill splits a long prompt into pieces and runs them together with the decode steps of other requests.", "A long prompt then does not stall everyone else, so inter-token latency stays steady.", ("split|pieces", "prompt")),
    Entry(("head-of-line blocking",), "Head-of-line blocking is when a short request has to wait behind a long one.", "Continuous batching, chunked prefill and priorities reduce it.", ("wait", "long")),
    Entry(("preemption",), "Preemption takes memory from a running request so that others can go on.", "Its KV cache is swapped out or computed again later. The answer must not change.", ("memory|KV", "request")),
    Entry(("prefix caching", "prefix cache"), "Prefix caching keeps the KV blocks of a prompt so that a later request with the same beginning reuses them.", "It saves prefill work and lowers TTFT, for example for a shared system prompt.", ("same|shared", "reuse|KV")),
    Entry(("RadixAttention", "radix attention"), "RadixAttention keeps cached prefixes in a radix tree and finds the longest match for each new prompt.", "Leaves that were not used for the longest time are evicted first.", ("radix tree",)),
    Entry(("speculative decoding", "speculation"), "In speculative decoding a small draft model proposes several tokens and the large model checks them in one pass.", "With the right acceptance rule the output has exactly the distribution of the large model alone.", ("draft", "check|verif")),
    Entry(("a draft model", "draft model"), "A draft model is the small model that proposes tokens in speculative decoding.", "It must use the same tokenizer as the target and should often agree with it.", ("small", "propose")),
    Entry(("the acceptance rate", "acceptance rate"), "The acceptance rate is the share of drafted tokens that the target model accepts.", "With rate a and g drafted tokens, one pass gives (1 - a^(g+1)) / (1 - a) tokens on average.", ("accept", "draft")),
    Entry(("Medusa", "Medusa heads"), "Medusa adds extra heads to the model that guess several future tokens at once.", "The guesses are checked in one pass, so no separate draft model is needed.", ("heads",)),
    Entry(("EAGLE",), "EAGLE drafts tokens with a small network that reads the hidden features of the target model.", "Because it sees those features, its drafts are accepted often.", ("feature", "draft")),
    Entry(("prompt lookup", "n-gram speculation"), "Prompt lookup drafts tokens by copying what followed the same words earlier in the text.", "It needs no draft model and works well where the output repeats the prompt.", ("cop|repeat",)),
    Entry(("quantization",), "Quantization stores numbers with fewer bits, such as 8 or 4 instead of 16.", "The model takes less memory, and decode gets faster because fewer bytes are read. Some quality may be lost.", ("bits",)),
    Entry(("INT8 quantization", "INT8"), "INT8 quantization stores values as 8-bit integers with a scale.", "It halves memory against 16-bit formats and is usually close in quality.", ("8-bit",)),
    Entry(("INT4 quantization", "INT4"), "INT4 quantization stores weights as 4-bit integers with a scale for each small group.", "It takes a quarter of the memory of 16-bit weights. A common group size is 128.", ("4-bit",)),
    Entry(("FP8",), "FP8 is an 8-bit floating-point format with the variants E4M3 and E5M2.", "Recent GPUs compute with it directly. It suits weights, activations and the KV cache.", ("8-bit",)),
    Entry(("GPTQ",), "GPTQ quantizes weights layer by layer and corrects the error with second-order information.", "It needs a small calibration set and reaches 4 bits or fewer.", ("weights", "layer")),
    Entry(("AWQ",), "AWQ is activation-aware weight quantization: it scales up the most important channels before rounding to 4 bits.", "Which channels matter is seen from the activations.", ("channels", "activation")),
    Entry(("SmoothQuant",), "SmoothQuant moves the difficulty of outliers from activations into the weights by a scale per channel.", "After that both weights and activations can use 8 bits.", ("activations", "weights")),
    Entry(("GGUF",), "GGUF is a file format for models, used by llama.cpp, that holds weights in many quantized forms.", "It keeps weights, tokenizer and settings in one file.", ("file format|format",)),
    Entry(("KV cache quantization", "KV quantization"), "KV cache quantization stores keys and values in fewer bits, such as INT8 or FP8.", "More requests or longer contexts then fit in the same memory.", ("fewer bits|8",)),
    Entry(("MHA", "multi-head attention"), "In MHA, multi-head attention, every query head has its own key and value head.", "That gives the largest KV cache of the usual variants.", ("every|each|own", "key")),
    Entry(("MQA", "multi-query attention"), "In MQA, multi-query attention, all query heads share one key and value head.", "The KV cache is smallest, at a small cost in quality.", ("share", "one")),
    Entry(("GQA", "grouped-query attention"), "In GQA, grouped-query attention, groups of query heads share one key and value head.", "It lies between MHA and MQA: a smaller KV cache with nearly full quality.", ("group", "share")),
    Entry(("MLA", "multi-head latent attention"), "MLA, multi-head latent attention, stores a small latent vector per token instead of full keys and values.", "Keys and values are computed from it, so the KV cache is very small.", ("latent",)),
    Entry(("sliding-window attention", "a sliding window"), "Sliding-window attention lets each token look only at the last few thousand tokens.", "The KV cache stays bounded, but distant text can be seen only through deeper layers.", ("last|window",)),
    Entry(("FlashAttention", "flash attention"), "FlashAttention computes exact attention in tiles that stay in fast memory, with an online softmax.", "It never writes the full score matrix, so it moves far fewer bytes.", ("tiles",)),
    Entry(("RoPE", "rotary position embedding"), "RoPE, rotary position embedding, rotates queries and keys by an angle that grows with position.", "Their product then depends only on the distance between tokens.", ("rotat",)),
    Entry(("the roofline model", "roofline"), "The roofline model says that speed is limited by peak compute or by memory bandwidth times arithmetic intensity, whichever is less.", "Decode sits on the bandwidth side and prefill on the compute side.", ("bandwidth", "compute")),
    Entry(("arithmetic intensity",), "Arithmetic intensity is the number of operations done per byte moved from memory.", "In decode it is about the batch size, in prefill about the prompt length.", ("per byte",)),
    Entry(("the ridge point", "ridge point"), "The ridge point is the arithmetic intensity at which compute and memory bandwidth are in balance.", "Below it work is bound by bandwidth, above it by compute.", ("intensity", "balance|bound")),
    Entry(("tensor parallelism",), "Tensor parallelism splits every layer's matrices across devices.", "They exchange results by all-reduce, usually twice per layer, so a fast link is needed.", ("split", "layer")),
    Entry(("pipeline parallelism",), "Pipeline parallelism puts different layers on different devices and passes activations along.", "It needs little communication, but several requests must be in flight to avoid bubbles.", ("layers", "devices")),
    Entry(("data parallelism",), "Data parallelism runs whole copies of the model side by side, each with its own requests.", "It raises throughput but does not make one request faster.", ("copies|copy",)),
    Entry(("expert parallelism",), "Expert parallelism places the experts of a mixture-of-experts model on different devices.", "Tokens travel to their experts and back by all-to-all.", ("experts", "devices")),
    Entry(("a mixture of experts", "MoE"), "A mixture of experts, MoE, has many expert networks and a router that sends each token to a few of them.", "Only the chosen experts compute, so the work per token is small for the size of the model.", ("router|few", "expert")),
    Entry(("disaggregated serving", "prefill/decode disaggregation"), "Disaggregated serving runs prefill and decode on separate machines.", "The KV cache moves from one to the other, and the two phases no longer disturb each other.", ("prefill", "decode", "separate")),
    Entry(("LoRA",), "LoRA adapts a model by adding the product of two small matrices to its weights.", "Many adapters can share one base model in memory.", ("small matrices|matrices",)),
    Entry(("multi-LoRA serving",), "Multi-LoRA serving runs many LoRA adapters over one base model, even within one batch.", "It is far cheaper than a full copy of the model for each adapter.", ("adapter", "base")),
    Entry(("CUDA graphs", "a CUDA graph"), "A CUDA graph records a sequence of GPU kernels and launches it as one.", "It removes the cost of single launches, which matters in decode with small batches.", ("kernel", "launch")),
    Entry(("temperature",), "Temperature divides the logits before sampling: low values make the choice sharper, high values more random.", "Temperature 0 means greedy decoding.", ("random|sharper",)),
    Entry(("top-p", "nucleus sampling"), "Top-p sampling keeps the smallest set of tokens whose probabilities add up to p and samples from it.", "It is also called nucleus sampling.", ("smallest set|probabilit",)),
    Entry(("top-k",), "Top-k sampling keeps only the k most likely tokens.", "The rest get no chance at all.", ("most likely",)),
    Entry(("greedy decoding",), "Greedy decoding always takes the most likely token.", "It is the same as temperature 0.", ("most likely",)),
    Entry(("structured output", "constrained decoding"), "Structured output masks every token that would break a grammar or JSON schema.", "What comes out can then always be parsed.", ("grammar|schema",)),
    Entry(("a stop sequence", "stop sequences"), "A stop sequence is a text that ends generation when the model writes it.", "Without a stop or an end token, output runs on until max_tokens.", ("end",)),
    Entry(("EOS", "the EOS token"), "EOS is the end-of-sequence token: when the model picks it, the answer is complete.", "If it is missing from the settings, answers run on.", ("end",)),
    Entry(("a token", "token"), "A token is a piece of text, often a word or a part of one, that the model reads and writes as one unit.", "An English word is about 1.3 tokens on average.", ("piece|part",)),
    Entry(("a tokenizer", "tokenizer", "tokenization"), "A tokenizer turns text into token ids and back.", "Most models use byte-pair encoding.", ("text", "ids")),
    Entry(("BPE", "byte-pair encoding"), "BPE, byte-pair encoding, builds a vocabulary by merging the most frequent neighbouring pieces again and again.", "On bytes it can spell any text.", ("merg",)),
    Entry(("logits",), "Logits are the scores that a model gives to every token of the vocabulary for the next position.", "Softmax turns them into probabilities.", ("scores",)),
    Entry(("a chat template", "chat template"), "A chat template turns a list of messages into the exact text that a model was trained on.", "With the wrong template even a good model answers badly.", ("messages",)),
    Entry(("a system prompt", "system prompt"), "A system prompt is the first message, which tells the model how to behave.", "It is often the same for many requests, so prefix caching pays off.", ("behave|first",)),
    Entry(("the context window", "context window", "context length"), "The context window is the largest number of tokens a model can read and write in one request.", "Prompt and answer share it.", ("number of tokens",)),
    Entry(("admission control",), "Admission control decides whether a request may enter, given memory, queue and deadline.", "Refusing early is better than failing late. A refusal is a 429 with a time to retry.", ("enter|refus",)),
    Entry(("batch size",), "The batch size is how many sequences run in one step.", "A larger batch shares each read of the weights, until memory or compute runs out.", ("sequences", "step")),
    Entry(("HBM",), "HBM is high-bandwidth memory, the main memory of a data-center GPU.", "Its bandwidth sets the speed of decode.", ("memory",)),
    Entry(("vLLM",), "vLLM is an open-source LLM server known for PagedAttention and continuous batching.", "It offers an OpenAI-compatible API.", ("server|serving",)),
    Entry(("llama.cpp",), "llama.cpp runs LLMs in C++ on CPUs and many other devices, with GGUF files.", "It is popular on laptops and at the edge.", ("CPU|GGUF",)),
    Entry(("Quire",), "Quire is an LLM inference and serving system in Python with native CPU kernels and a paged KV cache.", "A quire is a gathering of pages; here the pages are KV blocks.", ("inference|serving",)),
    Entry(("batch invariance",), "Batch invariance means that a request gets the same bits whatever else is in the batch.", "It needs kernels whose order of summation does not depend on the batch.", ("same",)),
    Entry(("perplexity",), "Perplexity is the exponential of the mean negative log-likelihood per token.", "Lower is better: the model is less surprised by the text.", ("log|surprised",)),
)  # fmt: skip

QUESTIONS = (
    Question(("Why is decode memory-bound?", "Why is decode limited by memory bandwidth?", "What limits decode speed?", "Why is decoding slow on big models?"), "Decode makes one token per step, yet every step reads all weights and the KV cache. There is little arithmetic per byte, so memory bandwidth is the limit.", ("bandwidth",)),
    Question(("Why is prefill compute-bound?", "What limits prefill?", "Why is prefill limited by compute?"), "Prefill handles all prompt tokens at once, so each weight that is read serves many tokens. The arithmetic then takes longer than the reading.", ("prompt",)),
    Question(("How large is a KV cache?", "What is the formula for the KV cache size?", "How do I compute the size of the KV cache?", "How many bytes does a KV cache take?"), "KV bytes = 2 × layers × KV heads × head dimension × tokens × bytes per number, for each sequence. The 2 is for keys and values.", ("2", "layers", "KV heads")),
    Question(("How much memory do the weights of a model take?", "How big are the weights of an LLM?", "How do I estimate weight memory?"), "Weights take the number of parameters times the bytes per parameter. A 7B model in 16 bits takes about 14 GB.", ("parameters", "14 GB")),
    Question(("How much memory does a 7B model need in 4 bits?", "How big is a 7B model in INT4?"), "About 3.5 GB for the weights: 7 billion parameters times half a byte. The KV cache comes on top.", ("3.5 GB",)),
    Question(("How much memory does a 7B model need in INT8?", "How big is a 7B model in 8 bits?"), "About 7 GB for the weights: 7 billion parameters times one byte. The KV cache comes on top.", ("7 GB",)),
    Question(("How many FLOPs does one token cost?", "How much compute does a token need?"), "About 2 FLOPs per parameter for each token, plus the attention over the context.", ("2",)),
    Question(("How fast can decode be at most?", "What is the upper bound on tokens per second?", "How do I estimate the maximum decode speed?"), "For one stream, at most memory bandwidth divided by the bytes read per token, which are the weights plus the KV cache.", ("bandwidth", "divided")),
    Question(("How is TPOT related to ITL?", "What is the difference between TPOT and ITL?", "Is TPOT the same as ITL?"), "ITL is each single gap between tokens. TPOT is the mean of these gaps over one request.", ("mean", "gap")),
    Question(("How do I lower TTFT?", "How can I reduce the time to first token?", "My TTFT is too high. What helps?"), "Shorten prompts, use prefix caching, and keep the queue short by adding capacity. Faster prefill helps too.", ("prefix caching", "queue")),
    Question(("How do I lower TPOT?", "How can I make decode faster?", "How can I reduce inter-token latency?"), "Read fewer bytes per token: quantize weights and KV cache. Smaller batches, chunked prefill and speculative decoding also help.", ("quantize",)),
    Question(("Does speculative decoding change the output?", "Is speculative decoding lossless?", "Does speculation lower quality?"), "No. With the modified rejection rule the output follows the distribution of the target model exactly, and greedy output is the same.", ("No",)),
    Question(("When does speculative decoding not help?", "When is speculation useless?"), "When the draft is rarely accepted, or when large batches already use all compute.", ("accept|batch",)),
    Question(("What is the difference between prefill and decode?", "How do prefill and decode differ?", "Compare prefill and decode."), "Prefill reads the whole prompt at once and is bound by compute. Decode writes one token at a time and is bound by memory bandwidth.", ("compute", "memory bandwidth")),
    Question(("What is the difference between MHA, MQA and GQA?", "Compare MHA, GQA and MQA.", "How do GQA and MQA differ?"), "MHA has a key and value head for every query head, MQA has one for all, and GQA has one for each group of query heads.", ("group", "all|one")),
    Question(("Why does GQA save memory?", "How does GQA shrink the KV cache?"), "The KV cache grows with the number of key and value heads, and GQA has fewer of them.", ("fewer",)),
    Question(("Why does a server run out of memory under load?", "Why do I get OOM only under load?", "My server runs out of memory when many users come. Why?"), "The KV cache grows with context length times running requests. Limit the context or the number of requests, or quantize the KV cache.", ("KV cache",)),
    Question(("What is the difference between the KV cache and the prefix cache?", "Is prefix caching the same as the KV cache?", "How does a prefix cache differ from a KV cache?"), "The KV cache serves one running request. The prefix cache keeps KV blocks after it ends so that other requests with the same beginning reuse them.", ("running|one request", "reuse|other")),
    Question(("What is the difference between tensor and pipeline parallelism?", "Compare tensor parallelism and pipeline parallelism.", "When do I use tensor or pipeline parallelism?"), "Tensor parallelism splits each layer and needs fast links. Pipeline parallelism splits the layers into stages and needs several requests in flight.", ("each layer|layer", "stages")),
    Question(("Why does batching help decode?", "Why do larger batches raise throughput?", "What does batching do for decode?"), "One read of the weights serves every sequence in the batch, so tokens per second grow with the batch until compute or memory runs out.", ("weights",)),
    Question(("Why do answers differ at temperature 0?", "Same prompt, temperature 0, different answers. Why?", "Why is greedy decoding not always repeatable?"), "In many engines the batch changes the order of floating-point sums, so results differ slightly. Batch-invariant kernels prevent that.", ("order|sum",)),
    Question(("Why do I get garbage from a good model?", "My model answers nonsense. What is wrong?", "What happens with a wrong chat template?"), "Often the chat template or the stop tokens are wrong. Use the template that comes with the model.", ("template",)),
    Question(("How do I use prefix caching well?", "How should I write prompts for prefix caching?", "How can I get more prefix cache hits?"), "Put the fixed part first and what changes last, and leave timestamps out of the beginning.", ("first",)),
    Question(("What does PagedAttention waste?", "How much memory does paging waste?"), "At most the unused rest of the last block of each sequence.", ("last block",)),
    Question(("How do I serve many fine-tuned models cheaply?", "How can I serve a hundred adapters?"), "Use multi-LoRA serving: one base model in memory and many small adapters, batched together.", ("LoRA",)),
    Question(("Should I report mean or p99 latency?", "Why look at p99 and not the mean?"), "Look at both. Users feel the tail, and a good mean can hide a bad p99.", ("tail|p99",)),
    Question(("Why is goodput better than throughput?", "What is the difference between goodput and throughput?"), "Throughput counts all work. Goodput counts only requests that met their latency targets, which is what users feel.", ("target|met",)),
)  # fmt: skip
