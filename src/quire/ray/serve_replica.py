"""A deployment of Ray Serve: replicas with all routes of `quire serve`, behind Ray's proxies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.llm.openai_app import OpenAIApp, openai_app
from quire.loader import DEFAULT_MODEL
from quire.types import QuireError
from quire.util.sizes import parse_size

# Ray's own limit for a replica is 5 running requests; here a replica's engine decides, and says 429 by itself.
_ONGOING = 1024
_SHUTDOWN_SECONDS = 30.0  # in which running requests of a replica may end


class ServeReplica:
    """A replica: the application is its ingress (`app`, which Ray puts here), this says whether it is well."""

    app: OpenAIApp

    async def check_health(self) -> None:
        """Called by Ray; a replica that raises here is replaced. An engine that starts again by itself is not."""
        self.app.check()


def serve_app(
    model: str | Path = DEFAULT_MODEL,
    *,
    memory: str | int,
    threads: int = 1,
    deployment: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An application of Ray Serve, for `serve.run`.

        serve.run(serve_app("quire-mini", memory="1GiB", threads=2, deployment={"num_replicas": 3}))

    `memory` is what the processes of a replica may hold together, with what Ray has loaded into them; `memory` and
    `threads` are also what Ray counts for a replica. `deployment` are arguments of serve.deployment, such as
    num_replicas and autoscaling_config; `options` those of openai_app. Raises ValueError, and QuireError without Ray.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise QuireError("ray.serve is not installed: pip install 'quire-llm[ray]'") from error
    application = openai_app(model, memory=memory, threads=threads, **options)
    asked = dict(deployment or {})
    of_actor = {
        "num_cpus": threads,
        "memory": parse_size(memory) if isinstance(memory, str) else memory,
        **asked.pop("ray_actor_options", {}),
    }
    chosen = {
        "name": "quire", "max_ongoing_requests": _ONGOING, "graceful_shutdown_timeout_s": _SHUTDOWN_SECONDS, **asked
    }  # fmt: skip
    made = serve.deployment(ray_actor_options=of_actor, **chosen)(serve.ingress(application)(ServeReplica))
    return made.bind()


def build(args: dict[str, Any]) -> Any:
    """`serve_app` from the `args` of a Serve config file: `import_path: quire.ray:build`."""
    return serve_app(**args)
