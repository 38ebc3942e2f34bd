"""Output hooks that a server of the tests loads by name."""

from __future__ import annotations

import threading

from quire.output_hook import OutputChunk, OutputEdit

# What a hook saw: the chunks of every answer, in the order of the calls.
SEEN: list[tuple[str, str, bool]] = []
LATE = threading.Event()  # until it is set, `late` does not return


def mask(chunk: OutputChunk) -> OutputEdit:
    """Each vowel becomes a star and every second letter is doubled, whatever the pieces: holds the last letter back."""
    SEEN.append((chunk.kind, chunk.text, chunk.last))
    text, held = (chunk.text, "") if chunk.last else (chunk.text[:-1], chunk.text[-1:])
    made = ""
    for letter in text:
        odd = chunk.state["odd"] = not chunk.state.get("odd", False)
        made += ("*" if letter in "aeiou" else letter) * (1 if odd else 2)
    return OutputEdit(made, held)


def upper(chunk: OutputChunk) -> OutputEdit:
    """Capitals in angles, which open with the first piece of a part and close with its last."""
    SEEN.append((chunk.kind, chunk.text, chunk.last))
    begins = not chunk.state.get("open", False)
    chunk.state["open"] = not chunk.last
    return OutputEdit("<" * begins + chunk.text.upper() + ">" * chunk.last)


def five(chunk: OutputChunk) -> OutputEdit | None:
    """Ends the answer behind five characters."""
    left = chunk.state.setdefault("left", 5)
    chunk.state["left"] -= len(chunk.text)
    return OutputEdit(chunk.text[:left], end="five is enough") if len(chunk.text) >= left else None


def late(chunk: OutputChunk) -> None:
    """Does not return in time."""
    LATE.wait(60)


def broken(chunk: OutputChunk) -> str:
    """Raises."""
    raise KeyError("a secret")


def wrong(chunk: OutputChunk) -> int:
    """Returns what no hook may."""
    return 1


async def coroutine(chunk: OutputChunk) -> None:
    """Is async."""
