"""APIs of other servers: thin translators to the one request inside, and from the parts of its answer.

A translator is a file of types and a handler, and a file that writes answers. It never reads text that the model wrote:
the engine has divided it into text, reasoning and calls (docs/decisions/0076-dialects.md).
"""

from __future__ import annotations

from quire.server.dialects import (
    anthropic,
    llama_server,
    llama_server_adapters,
    llama_server_pages,
    ollama,
    ollama_pages,
    openai_responses,
    responses_counts,
    sglang,
    tgi,
)
from quire.server.dialects.anthropic_types import ANTHROPIC_ERRORS
from quire.server.dialects.llama_server_types import LLAMA_SERVER_ERRORS
from quire.server.dialects.ollama_types import OLLAMA_ERRORS
from quire.server.dialects.responses_types import RESPONSES_ERRORS
from quire.server.dialects.sglang_types import SGLANG_ERRORS
from quire.server.dialects.tgi_types import TGI_ERRORS
from quire.server.errors import OPENAI_ERRORS
from quire.server.routes import HttpRoute

DIALECTS: tuple[HttpRoute, ...] = (
    *openai_responses.ROUTES,
    *responses_counts.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *ollama_pages.ROUTES,
    *llama_server.ROUTES,
    *llama_server_pages.ROUTES,
    *llama_server_adapters.ROUTES,
    *sglang.ROUTES,
    *tgi.ROUTES,
)
ERROR_FORMS = (
    OPENAI_ERRORS, RESPONSES_ERRORS, ANTHROPIC_ERRORS, OLLAMA_ERRORS, LLAMA_SERVER_ERRORS, SGLANG_ERRORS, TGI_ERRORS,
)  # fmt: skip
