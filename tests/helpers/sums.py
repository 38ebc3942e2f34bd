"""A chat with a server in another process."""

from __future__ import annotations

import contextlib
import http.client
import json

from helpers.server import GUARD

_BODY = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 20, "temperature": 0}


def ask_a_sum(url: str, model: str | None = None) -> tuple[int, str]:
    """Ask the server at http://host:port, or a model there, what 2 + 3 is; the status, and the text of the answer or of
    the error."""
    body = _BODY | ({} if model is None else {"model": model})
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=GUARD)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        said = found["choices"][0]["message"]["content"] if answer.status == 200 else str(found)
        return answer.status, said
