"""Every field that a client library can send: in the server's schema, a label, or refused by name; and in the docs."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DOCS = "".join(
    (Path(__file__).parents[2] / "docs" / name).read_text()
    for name in ("clients.md", "server.md", "embeddings.md")
)
ODD = {"nobody": ["expects this"]}
# Fields that change nothing: what they are, the docs say.
LABELS = {
    "/v1/chat/completions": {"user", "metadata", "safety_identifier", "prompt_cache_key"},
    "/v1/completions": {"user"},
    "/v1/embeddings": {"user"},
    "/v1/responses": {"prompt_cache_key", "safety_identifier"},
    "/v1/messages": {"metadata", "user_profile_id", "workspace_id"},
    "/v1/messages/count_tokens": {"user_profile_id", "workspace_id"},
}


def names_of(*kinds: Any) -> list[str]:
    """The fields of typed dictionaries or pydantic's models, sorted."""
    return sorted(
        {name for kind in kinds for name in getattr(kind, "model_fields", None) or kind.__annotations__}
    )


class Fields:
    """What a server says about the bodies of its routes, and what it answers to others."""

    def __init__(self, url: str, key: str = "secret") -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._document = json.loads(self._ask("/openapi.json", None)[1])

    def check(self, path: str, names: Iterable[str], body: Mapping[str, Any], *within: str | int) -> None:
        """Each of `names`, in the body or what is `within` it, is done or refused, and documented.

        `body` is a right request; `within` are keys and indices.
        """
        content = self._document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        known = self._properties(content["schema"], [name for name in within if isinstance(name, str)])
        labels = set() if within else LABELS.get(path, set())
        for name in names:
            assert re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", DOCS), (
                f"{path}: {name} is not in docs/clients.md"
            )
            if name not in known | labels:
                changed = json.loads(json.dumps(body))
                inner = changed
                for key in within:
                    inner = inner[key]
                inner[name] = ODD
                status, text = self._ask(path, changed)
                assert status in {400, 422}, f"{path}: {name} is ignored: {status} {text}"
                assert name in text, f"{path}: {name} is refused with {text}"

    def _properties(self, schema: Mapping[str, Any], within: list[str]) -> set[str]:
        """The names in an object of a schema, whatever alternatives it has."""
        found = [schema]
        for name in [*within, ""]:
            found = [one for start in found for one in self._alternatives(start)]
            if name:
                found = [one["properties"][name] for one in found if name in one.get("properties", ())]
        return {name for one in found for name in one.get("properties", ())}

    def _alternatives(self, schema: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        if "$ref" in schema:
            yield from self._alternatives(
                self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            )
            return
        yield schema
        for kind in ("anyOf", "oneOf", "allOf"):
            for one in schema.get(kind, ()):
                yield from self._alternatives(one)
        if isinstance(schema.get("items"), dict):
            yield from self._alternatives(schema["items"])

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
