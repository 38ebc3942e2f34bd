"""APIs of other servers: thin translators to the one request inside, and from the parts of its answer.

A translator is a file of types and a handler, and a file that writes answers. It never reads text that the model wrote:
the engine has divided it into text, reasoning and calls (docs/decisions/0076-dialects.md).
"""

from __future__ import annotations

from quire.server.dialects import anthropic, ollama, openai_responses
from quire.server.dialects.anthropic_types import ANTHROPIC_ERRORS
from quire.server.dialects.ollama_types import OLLAMA_ERRORS
from quire.server.dialects.responses_types import RESPONSES_ERRORS
from quire.server.errors import OPENAI_ERRORS
from quire.server.routes import HttpRoute

DIALECTS: tuple[HttpRoute, ...] = (*openai_responses.ROUTES, *anthropic.ROUTES, *ollama.ROUTES)
ERROR_FORMS = (OPENAI_ERRORS, RESPONSES_ERRORS, ANTHROPIC_ERRORS, OLLAMA_ERRORS)
