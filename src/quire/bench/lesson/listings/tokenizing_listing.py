"""Split a text into tokens and put it together again, with the tokenizer of the bundled model."""

from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.text.tokenizer import Tokenizer


def main() -> None:
    tokenizer = Tokenizer.from_dir(shipped_models()[DEFAULT_MODEL])
    text = "Batching supports custom LLM inference."
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokenizer.token_bytes(token).decode() for token in ids]
    print(f"{len(text.split())} words, {len(text)} characters")
    print(len(ids), "tokens:", " | ".join(pieces))
    print("more than words, fewer than characters:", len(text.split()) < len(ids) < len(text))
    print("the same text again:", tokenizer.decode(ids) == text)
