"""Grammars stepped byte by byte: whether they accept a text, and texts that they lead to."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from itertools import islice, permutations, product
from typing import Any

import llguidance as ll

END = 256


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<|end|>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def byte_tokenizer() -> ll.LLTokenizer:
    return ll.LLTokenizer(ll.TokenizerWrapper(_Bytes()), slices=[])


def matcher(source: str) -> ll.LLMatcher:
    """A matcher at the start of a grammar; fails for a grammar that does not compile."""
    made = ll.LLMatcher(byte_tokenizer(), source, log_level=0)
    assert not made.is_error(), made.get_error()[:2000]
    return made


def accepts(source: str, text: str) -> bool:
    """True if a text is an answer of a grammar."""
    data = text.encode()
    made = matcher(source)
    return made.try_consume_tokens(list(data)) == len(data) and made.is_accepting()


def allowed(made: ll.LLMatcher) -> list[int]:
    mask = made.compute_bitmask()
    assert not made.is_error(), made.get_error()[:2000]
    return [i for i in range(END) if mask[i >> 3] >> (i & 7) & 1]


def walk(source: str, seed: int, length: int = 80) -> str | None:
    """An answer found at random; None if it has not ended after ten times `length` bytes.

    Before `length`, bytes are chosen freely; behind it, those that close something are preferred.
    """
    rng, made, out = random.Random(seed), matcher(source), bytearray()
    calm = rng.random()
    while len(out) < 10 * length:
        choices = allowed(made)
        over = len(out) > length
        if made.is_accepting() and (not choices or over or rng.random() < 0.2):
            return out.decode()
        assert choices, f"dead end after {out!r}"
        plain = [byte for byte in choices if byte not in b" \t\n\r\\"]
        closers = [byte for byte in choices if byte in b'"]}']
        letters = [byte for byte in plain if byte < 128]
        if closers and (over or rng.random() < 0.3 * calm):
            byte = rng.choice(closers)
        elif plain and (over or rng.random() < 0.9):
            byte = rng.choice(letters if letters and rng.random() < 0.9 else plain)
        else:
            byte = rng.choice(choices)
        out.append(byte)
        assert made.consume_token(byte), made.get_error()[:500]
    return None


def serialisations(value: Any) -> Iterator[str]:
    """Texts of a value, with properties in every order."""
    if isinstance(value, dict):
        for keys in permutations(value):
            for parts in product(*(list(islice(serialisations(value[key]), 24)) for key in keys)):
                heads = (json.dumps(key, ensure_ascii=False) for key in keys)
                yield f"{{{','.join(f'{head}:{part}' for head, part in zip(heads, parts, strict=True))}}}"
    elif isinstance(value, list):
        for parts in product(*(list(islice(serialisations(one), 24)) for one in value)):
            yield f"[{','.join(parts)}]"
    elif isinstance(value, float):
        yield str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
        if value.is_integer() and abs(value) < 1e300:
            yield repr(value)
    else:
        yield json.dumps(value, ensure_ascii=False)


def producible(source: str, value: Any) -> bool:
    """True if a value is an answer in some serialisation."""
    return any(accepts(source, text) for text in islice(serialisations(value), 1000))
