"""What translators share: a request of another API becomes a ChatCompletionRequest, the one request inside.

A translator says which field of its own API each field came from, so that errors name what the client wrote.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quire.server.context import ServerContext
from quire.server.errors import ApiError
from quire.types import ContextLengthError, RequestError

# Variables of templates that turn reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")
# Patterns of the start of a field inside -> the field of the API.
Renames = Mapping[str, str]


@contextlib.contextmanager
def renamed(names: Renames) -> Iterator[None]:
    """Errors raised inside name the fields of another API."""
    try:
        yield
    except ContextLengthError as error:
        raise ContextLengthError(_name(error.field, names), error.message) from None
    except RequestError as error:
        raise RequestError(_name(error.field, names), error.message) from None
    except ApiError as error:
        if error.param is None:
            raise
        here, text = _name(error.param, names), str(error)
        if text.startswith(error.param):
            text = here + text[len(error.param) :]
        raise ApiError(
            error.status, text, code=error.code, param=here, headers=error.headers, close=error.close
        ) from None


def _name(field: str, names: Renames) -> str:
    for pattern, name in names.items():
        changed, count = re.subn(f"^{pattern}", name, field)
        if count:
            return changed
    return field


def reasons(context: ServerContext) -> bool:
    """Whether the answers of the model have a region of reasoning."""
    reading = context.engine.reading(None)
    return reading is not None and reading.regions.spec.reasoning is not None


def thinking_fields(context: ServerContext, wanted: bool | str, field: str) -> dict[str, Any]:
    """Fields of a chat request that turn reasoning on or off, or ask for an effort, by its template or its budget.

    Raises RequestError naming `field` if the model does not reason.
    """
    card = context.card()
    switch = next((name for name in _SWITCHES if name in card.template_variables), None)
    if wanted is False:
        if switch is not None:
            return {"chat_template_kwargs": {switch: False}}
        return {"thinking_token_budget": 0} if reasons(context) else {}
    if not reasons(context):
        raise RequestError(field, f"{card.name} does not reason")
    if isinstance(wanted, str):
        if "reasoning_effort" in card.template_variables:
            return {"reasoning_effort": wanted}
        raise RequestError(field, f"{wanted!r:.50}: the template of {card.name} reads no effort of reasoning")
    return {} if switch is None else {"chat_template_kwargs": {switch: True}}
