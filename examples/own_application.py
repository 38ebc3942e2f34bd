"""An application of one's own with the APIs of a model under /llm.

    pip install starlette
    MODEL=path/to/model uvicorn --app-dir examples own_application:site
    curl localhost:8000/llm/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hi"}]}'

FastAPI is the same: `site = FastAPI(lifespan=llm.lifespan)`, then `site.mount("/llm", llm)`.
"""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import quire

llm = quire.openai_app(os.environ.get("MODEL", "quire-mini"), max_num_seqs=8)


async def home(_: Request) -> PlainTextResponse:
    """A page of the application."""
    return PlainTextResponse("The model is at /llm/v1.")


# Mounted applications are not started by frameworks: the lifespan of the model is that of the whole.
site = Starlette(routes=[Route("/", home), Mount("/llm", llm)], lifespan=llm.lifespan)
