"""Microseconds per token to turn ids into text as they are generated, including the search for stop strings.

Compares, on tokenizers trained here (byte level, and SentencePiece style with byte fallback), one id at a time:

- quire: quire.text's detokenizer;
- DecodeStream: the tokenizers library's own streaming decoder;
- window: the usual two decodes of a short window (prefix and read offsets), as engines did it before;
- library: one decode of everything at the end, the floor that no stream can reach.

Run: python benchmarks/detokenizer.py [--tokens N] [--repeat N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer

WORDS = "time year people way day man thing woman life child world school state family student group country"
WORDS += (
    " problem hand part place case week company system program question work government number night point"
)
WORDS += " größe façade naïve мир привет дела 你好 世界 今日は 한국어 😀 👍🏽 🚀 0x1f 3.1415 {'a': 1} != -> __init__"
WORDS += " don't it's"


def corpus(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS.split()) for _ in range(words))


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([corpus(seed, 200) for seed in range(20)], trainer)
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=tokens, limit_alphabet=40, show_progress=False
    )
    backend.train_from_iterator([corpus(seed, 200) for seed in range(20)], trainer)
    # Byte tokens are ordinary vocabulary in real checkpoints, not special tokens.
    data = json.loads(backend.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] == 0]
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)))


def quire(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    detokenizer = tokenizer.detokenizer()
    push = detokenizer.push
    for token_id in ids:
        yield push((token_id,))
    yield detokenizer.finish()


def decode_stream(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    backend = tokenizer._backend
    step = decoders.DecodeStream(skip_special_tokens=True).step
    for token_id in ids:
        yield step(backend, token_id) or ""


def window(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    decode = tokenizer._backend.decode
    prefix, read = 0, 0
    for end in range(1, len(ids) + 1):
        shown, whole = decode(ids[prefix:read]), decode(ids[prefix:end])
        if len(whole) > len(shown) and not whole.endswith("�"):
            yield whole[len(shown) :]
            prefix, read = read, end


def library(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    yield tokenizer.decode(ids)


def quire_with_stops(tokenizer: Tokenizer, ids: list[int]) -> Iterator[str]:
    matcher = StopStrings(["\n\nHuman:", "<|im_end|>", "```", "Observation:"]).matcher()
    for delta in quire(tokenizer, ids):
        yield matcher.push(delta)[0]
    yield matcher.finish()


METHODS: dict[str, Callable[[Tokenizer, list[int]], Iterator[str]]] = {
    "quire": quire,
    "quire + 4 stop strings": quire_with_stops,
    "DecodeStream": decode_stream,
    "window": window,
    "library (all at once)": library,
}


def measure(
    method: Callable[[Tokenizer, list[int]], Iterator[str]], tokenizer: Tokenizer, ids: list[int]
) -> float:
    """Seconds for one pass over the ids; the text is discarded."""
    start = time.perf_counter()
    for _ in method(tokenizer, ids):
        pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    rows = []
    for kind, tokenizer in (("byte level", byte_level()), ("SentencePiece style", sentencepiece())):
        ids = tokenizer.encode(corpus(99, arguments.tokens))[: arguments.tokens]
        whole = tokenizer.decode(ids)
        for name, method in METHODS.items():
            seconds = [measure(method, tokenizer, ids) for _ in range(arguments.repeat)]
            rows.append(
                {
                    "tokenizer": kind,
                    "method": name,
                    "median_us_per_token": statistics.median(seconds) / len(ids) * 1e6,
                    "best_us_per_token": min(seconds) / len(ids) * 1e6,
                    "equals_decode": "".join(method(tokenizer, ids)) == whole,
                }
            )
    versions = {"python": platform.python_version(), "tokenizers": tokenizers.__version__}
    print(f"{arguments.tokens} tokens, {arguments.repeat} passes, {versions}\n")
    print("| tokenizer | method | median µs/token | best | equals decode |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['tokenizer']} | {row['method']} | {row['median_us_per_token']:.2f} "
            f"| {row['best_us_per_token']:.2f} | {'yes' if row['equals_decode'] else 'no'} |"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"versions": versions, "tokens": arguments.tokens, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
