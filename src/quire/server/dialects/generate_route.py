"""POST /generate, which two APIs have: the fields of a body say whose it is."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from quire.server import json_input
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange, off_loop
from quire.server.routes import HttpRoute, Post

PATH = "/generate"
# The fields with the prompt, one of which every body has: API -> names.
_PROMPTS = {"tgi": ("inputs",), "sglang": ("text", "input_ids", "input_embeds")}


@dataclass(frozen=True, kw_only=True, eq=False)
class GenerateRoute(HttpRoute):
    """The routes of several APIs on one path: `choices`, by API. A body goes to the API whose prompt it has."""

    method = "POST"
    choices: dict[str, Post]  # type: ignore[type-arg]

    async def answer(self, context: ServerContext, exchange: Exchange) -> None:
        """Answer as the API of the body does. Raises ApiError for a body that is of none, or of more than one."""
        context.card()
        body = await exchange.body(context.config.max_body_bytes, context.config.body_timeout)
        names = await off_loop(len(body), functools.partial(json_input.top_level_keys, body))
        found = [api for api in self.choices if names.intersection(_PROMPTS[api])]
        if len(found) != 1:
            wanted = "; ".join(f"{api}: {' or '.join(_PROMPTS[api])}" for api in self.choices)
            raise bad_request(None, f"send the prompt of one API ({wanted})", "missing_prompt")
        route = self.choices[found[0]]
        exchange.errors = route.errors
        await route.answer(context, exchange)


@functools.cache
def shared(routes: tuple[HttpRoute, ...]) -> tuple[HttpRoute, ...]:
    """The routes, with those of several APIs for POST /generate made one. Equal for equal routes."""
    choices = {route.api: route for route in routes if route.path == PATH and isinstance(route, Post)}
    if len(choices) < 2:
        return routes
    first = next(iter(choices.values()))
    rest = tuple(route for route in routes if route not in choices.values())
    made = GenerateRoute(
        path=PATH, response=first.response, summary="Continue a text, in the form of the API whose body it is",
        tag=first.tag, api=first.api, errors=first.errors, choices=choices,
    )  # fmt: skip
    return (*rest, made)
