"""The tokens of the texts that parameters name: bad words, breakers of DRY, and texts in logit_bias."""

from __future__ import annotations

from quire.parameters import TextTokens
from quire.text.tokenizer import Tokenizer
from quire.types import MAX_NAMED_TOKENS, RequestError, SamplingParams


def text_tokens(params: SamplingParams, tokenizer: Tokenizer | None) -> TextTokens | None:
    """What a request needs beside parameters with texts; None for others.

    Raises RequestError naming the field without a tokenizer, for a text without tokens, and over MAX_NAMED_TOKENS.
    """
    if not params.has_texts:
        return None
    biased = [(text, bias) for text, bias in params.logit_bias.items() if isinstance(text, str)]
    if tokenizer is None:
        name = "bad_words" if params.bad_words else "logit_bias" if biased else "dry_sequence_breakers"
        raise RequestError(name, "this model folder has no tokenizer, so no text has tokens")
    words = [ids for word in params.bad_words for ids in _bad_word(word, tokenizer)]
    biases = [
        (token, bias) for text, bias in biased for token in _ids("logit_bias", text, tokenizer, special=False)
    ]
    breakers = params.dry_sequence_breakers if params.dry_multiplier > 0 else ()
    found = TextTokens(
        tuple(words),
        # As text-generation-webui: after another character a text has the tokens that it has inside of a text.
        tuple(_ids("dry_sequence_breakers", f"a{text}", tokenizer)[-1] for text in breakers),
        tuple(biases),
    )
    lists = {
        "bad_words": sum(map(len, words)),
        "dry_sequence_breakers": len(found.breakers),
        "logit_bias": len(params.logit_bias) + len(biases),
    }
    named = sum(lists.values()) + len(params.banned_token_ids) + len(params.stop_token_ids)
    if named > MAX_NAMED_TOKENS:
        raise RequestError(
            max(lists, key=lambda name: lists[name]),
            f"{named} tokens in bad_words, dry_sequence_breakers, logit_bias, banned_token_ids and stop_token_ids"
            f" exceed the limit of {MAX_NAMED_TOKENS}",
        )
    return found


def _bad_word(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text, and inside of one if these are others, as vLLM takes them."""
    first = _ids("bad_words", word.lstrip(), tokenizer)
    inside = _ids("bad_words", f" {word.lstrip()}", tokenizer)
    return [first, inside] if inside[0] != first[0] and len(inside) == len(first) else [first]


def _ids(name: str, text: str, tokenizer: Tokenizer, *, special: bool = True) -> tuple[int, ...]:
    try:
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=special)
    except RequestError as error:
        raise RequestError(name, error.message) from None
    if not ids:
        raise RequestError(name, f"{text[:50]!r} has no tokens")
    return tuple(ids)
