"""Whether a prompt and its answer fit in a context."""

from __future__ import annotations

from quire.types import ContextLengthError


def check_window(
    prompt: int,
    max_tokens: int | None,
    window: int,
    name: str = "prompt_token_ids",
    asked: str = "max_tokens",
) -> None:
    """Raise ContextLengthError when a prompt of `prompt` tokens and the tokens to generate exceed a context.

    `max_tokens` None stands for the rest of the context. `name` and `asked` are the fields as the caller names them.
    """
    context = f"the model's context of {window} tokens (max_model_len)"
    if prompt >= window:
        raise ContextLengthError(name, f"{prompt} tokens leave no room for an output token in {context}")
    if max_tokens is not None and prompt + max_tokens > window:
        total = f"{prompt} prompt tokens and {max_tokens} to generate are {prompt + max_tokens}"
        raise ContextLengthError(asked, f"{total}, over {context}")
