"""The options of a server. Field names are the long options of `quire serve`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.config.kv_events import parse_kv_events
from quire.config.lora_modules import adapter_paths
from quire.config.option import option
from quire.config.router_link import parse_router
from quire.records import dataclass

_NOT_NEGATIVE = (
    "shutdown_timeout", "hang_timeout", "engine_restarts", "sse_ping_interval", "models_max", "simulator_interval",
)  # fmt: skip
LEAST_SIMULATOR_MEMORY = 64 * 2**20
_POSITIVE = (
    "output_hook_ms",
    "max_load_wait",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "response_store_size",
    "response_store_days",
    "max_body_bytes",
    "max_connections",
    "stall_timeout",
    "reader_timeout",
    "reader_tokens",
    "header_timeout",
    "body_timeout",
    "keep_alive_timeout",
    "websocket_idle_timeout",
    "max_file_size",
    "files_size",
    "files_expiry",
)
# APIs beside the routes for status: value of --api -> whose they are.
APIS = {
    "openai": "OpenAI's and vLLM's",
    "anthropic": "Anthropic's Messages",
    "ollama": "Ollama's",
    "llama-server": "llama-server's",
    "sglang": "SGLang's",
    "tgi": "TGI's",
}
# Sections of the options: first field -> title.
SUBJECTS = {
    "host": "address and TLS",
    "api_key": "access",
    "served_model_name": "API",
    "ssl_keyfile": "address and TLS",
    "allowed_hosts": "access",
    "unknown_fields": "API",
    "max_num_queued_reqs": "limits and timeouts",
    "shutdown_timeout": "supervision",
    "models_dir": "several models",
    "files_dir": "files and batches",
    "log_format": "logs and traces",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """The requested server: addresses, access, queue limits, timeouts. Times in seconds.

    Raises ValueError naming the field if a value is out of range or two contradict each other.
    """

    host: str = option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = option(8000, "TCP port to listen on; 0 picks a free one", metavar="N")
    grpc_port: int | None = option(
        None, "TCP port of KServe's protocol over gRPC on the same address; 0 picks a free one (default: off)",
        metavar="N",
    )  # fmt: skip
    uds: str | None = option(
        None, "listen on this Unix socket instead of an address and port", metavar="PATH"
    )
    api_key: tuple[str, ...] = option(
        (), "keys of clients; each request must present one (default: none)", metavar="KEY"
    )
    api_key_file: str | None = option(
        None, "file of keys, one per line; unlike --api-key, not visible in the process list", metavar="FILE"
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "keys of administrators, which open the routes that show or change the server's state (default: these routes "
        "are off)",
        metavar="KEY",
    )
    admin_api_key_file: str | None = option(
        None, "file of administrators' keys, one per line", metavar="FILE"
    )
    tenants: str | None = option(
        None,
        "TOML file of tenants: their keys as hashes, limits, weights, shares of the cache and what they may use; see "
        "docs/tenants.md (default: none)",
        metavar="FILE",
    )
    admin_host: str | None = option(
        None,
        "address of the routes for administrators, which are then on no other (default: that of all routes)",
        metavar="ADDRESS",
    )
    admin_port: int | None = option(None, "TCP port of that address; 0 picks a free one", metavar="N")
    prefix_cache_sharing: str = option(
        "key",
        "which requests share cached prefixes; key: those with the same API key, and each key has a share of the "
        "cache; all: every request",
        choices=("key", "all"),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names of the model in requests; the first is reported (default: the model argument)",
        metavar="NAME",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters to begin with, whose names are models in requests: NAME=PATH, or "
        '\'{"name": NAME, "path": PATH}\'',
        metavar="NAME=PATH",
    )
    lora_dir: str | None = option(
        None,
        "folder of the adapters that administrators may load with /v1/load_lora_adapter (default: off)",
        metavar="DIR",
    )
    api: tuple[str, ...] = option(
        (), f"APIs that clients may call: {', '.join(APIS)} (default: all of them)", metavar="NAME"
    )
    ui: bool = option(True, "serve the web page, a chat, at /")
    chat_template: str | None = option(
        None, "chat template that replaces the checkpoint's: a file, or its text", metavar="FILE"
    )
    tool_call_parser: str | None = option(
        None, "format of tool calls, with vLLM's names (default: found from the checkpoint)", metavar="NAME"
    )
    reasoning_parser: str | None = option(
        None, "format of reasoning, with vLLM's names (default: found from the checkpoint)", metavar="NAME"
    )
    ssl_keyfile: str | None = option(None, "private key for TLS, PEM", metavar="FILE")
    ssl_certfile: str | None = option(None, "certificate chain for TLS, PEM", metavar="FILE")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "accepted Host headers, * for any (default: loopback names on loopback, any elsewhere)",
        metavar="HOST",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "allowed browser origins, * for any (default: none)", metavar="ORIGIN"
    )
    unknown_fields: str = option("ignore", "handling of unknown request fields", choices=("ignore", "refuse"))
    enable_force_include_usage: bool = option(
        False, "end every stream with usage, as with stream_options.include_usage"
    )
    output_hook: str | None = option(
        None,
        "function of the Python path that sees, and may change or end, the text of every answer (default: none)",
        metavar="MODULE:FUNCTION",
    )
    output_hook_ms: float = option(
        50.0, "time limit in milliseconds for a call of the output hook", metavar="MS"
    )
    output_hook_failure: str = option(
        "stop",
        "an answer whose output hook fails or is late; stop: ends; pass: goes on without the hook",
        choices=("stop", "pass"),
    )
    kv_events_config: str | Mapping[str, Any] | None = option(
        None,
        "tell routers which KV blocks this server has: vLLM's JSON object, such as "
        '{"enable_kv_cache_events": true, "publisher": "null"}; see docs/kv_cache.md (default: nobody)',
        metavar="JSON",
    )
    router: str | None = option(
        None,
        "the router of this server: key=FILE, the key that both have; announce=URL, where it says that it is there; "
        "url=URL and name=NAME, what it says in place of its address; weight=NUMBER, its share of the requests "
        "(default: none)",
        metavar="SPEC",
    )
    sse_ping_interval: float = option(
        15.0, "seconds without text after which a stream has a ping; 0: never", metavar="S"
    )
    mcp: str | None = option(
        None,
        "JSON file of the tool servers (MCP) whose tools /v1/responses may run; see docs/clients.md (default: none)",
        metavar="FILE",
    )
    response_store: str | None = option(
        None, "keep stored responses of /v1/responses in this SQLite file (default: until the server stops)",
        metavar="FILE",
    )  # fmt: skip
    response_store_size: int = option(
        256 * 2**20, "bytes of stored responses; the oldest are removed first", metavar="SIZE", size=True
    )
    response_store_days: float = option(30.0, "days until a stored response is removed", metavar="N")
    max_num_queued_reqs: int = option(1024, "maximum number of queued requests", metavar="N")
    max_num_queued_tokens: int = option(
        2**20, "maximum number of prompt tokens of queued requests", metavar="N"
    )
    max_body_bytes: int = option(16 * 2**20, "largest request body in bytes", metavar="N")
    max_connections: int = option(4096, "maximum number of open connections", metavar="N")
    header_timeout: float = option(
        10.0, "time limit in seconds for a TLS handshake and the headers of a request", metavar="S"
    )
    body_timeout: float = option(60.0, "time limit in seconds for the body of a request", metavar="S")
    keep_alive_timeout: float = option(30.0, "seconds that an idle connection stays open", metavar="S")
    websocket_idle_timeout: float = option(
        600.0, "seconds that a WebSocket stays open without a message or a response", metavar="S"
    )
    reader_tokens: int = option(
        4096, "generated tokens that a client may leave unread before its request ends", metavar="N"
    )
    reader_timeout: float = option(
        30.0, "seconds that a client may leave output unread before its request ends", metavar="S"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests may continue after SIGTERM", metavar="S"
    )
    stall_timeout: float = option(
        10.0, "seconds without a step (or an answer if idle) until health reports a stall", metavar="S"
    )
    hang_timeout: float = option(
        60.0, "seconds of stall until the engine process is killed and restarted; 0: never", metavar="S"
    )
    engine_restarts: int = option(
        5, "restarts of the engine process within ten minutes before the server gives up", metavar="N"
    )
    models_dir: str | None = option(
        None, "folder whose subfolders and GGUF files are all served, each under its name", metavar="DIR"
    )
    models: str | None = option(
        None,
        "TOML file with a section for each model: its name, path, memory, aliases and options",
        metavar="FILE",
    )
    keep_alive: float = option(
        -1.0,
        "seconds without a request after which one of several models leaves the memory; -1: never",
        metavar="S",
    )
    allow_keep_alive: bool = option(
        False,
        "heed keep_alive in every request of Ollama's API; else only with an administrator's key",
    )
    models_max: int = option(
        0,
        "most models without a share of their own that are loaded at a time; the one that was idle for longest leaves "
        "for another; 0: all of them",
        metavar="N",
    )
    pull_limit: int | None = option(
        None,
        "serve the models of the store, and let administrators pull others into it with /api/pull up to this size of "
        "the store (default: off)",
        metavar="SIZE",
        size=True,
    )
    max_load_wait: float = option(
        120.0, "longest wait in seconds for one of several models to be loaded; others are told when to come back",
        metavar="S",
    )  # fmt: skip
    files_dir: str | None = option(
        None,
        "folder of files and batches, which turns on /v1/files and /v1/batches (default: off)",
        metavar="DIR",
    )
    max_file_size: int = option(200 * 2**20, "largest file that may be uploaded", metavar="SIZE", size=True)
    files_size: int = option(
        4 * 2**30, "limit of the bytes of all files of an API key", metavar="SIZE", size=True
    )
    files_expiry: float = option(
        2_592_000.0, "seconds that a file is kept, unless its upload says otherwise", metavar="S"
    )
    log_format: str = option("human", "format of the log", choices=("human", "json"))
    log_level: str = option(
        "info", "lowest severity that is logged", choices=("debug", "info", "warning", "error")
    )
    access_log: bool = option(False, "log a line for every request")
    quiet: bool = option(False, "write only errors to standard error")
    profile_dir: str | None = option(
        None, "folder of profiles, which /start_profile begins (default: off)", metavar="DIR"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send OpenTelemetry spans of requests and their stages to this collector (default: off)",
        metavar="URL",
    )

    simulator_memory: int | None = option(
        None,
        "let administrators ask /admin/whatif, and check the simulator against the load of this server, in a process "
        "of its own that has at most so much memory and only idle processors (default: off)",
        metavar="SIZE",
        size=True,
    )
    simulator_interval: float = option(
        600.0, "seconds between two of these checks at the least; 0: none", metavar="S"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices:
                raise ValueError(f"{f.name}: {value!r} is not one of {', '.join(choices)}")
        object.__setattr__(self, "api", _names(self.api))
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not above 0")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is below 0")
        for name in ("port", "grpc_port", "admin_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ValueError(f"{name}: {getattr(self, name)} is not in [0, 65535]")
        if self.grpc_port is not None and "openai" not in self.api:
            raise ValueError("grpc_port: needs openai in api, whose completions it is made of")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile: set both or neither")
        if self.quiet and self.access_log:
            raise ValueError("quiet and access_log: cannot be combined; set only one")
        adapter_paths(self.lora_modules)
        parse_kv_events(self.kv_events_config)
        parse_router(self.router)
        self._check_pulls()
        self._check_simulator()
        self._check_admin_address()
        for name in ("api_key", "admin_api_key"):
            _check_keys(name, getattr(self, name))

    def _check_admin_address(self) -> None:
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError("admin_host: needs admin_port, the port on that address")

    def _check_simulator(self) -> None:
        if self.simulator_memory is not None and self.simulator_memory < LEAST_SIMULATOR_MEMORY:
            raise ValueError(
                f"simulator_memory: {self.simulator_memory} bytes are below the minimum of {LEAST_SIMULATOR_MEMORY}"
            )

    def _check_pulls(self) -> None:
        if self.pull_limit is not None and not (self.admin_api_key or self.admin_api_key_file):
            raise ValueError("pull_limit: pulling is for administrators: it needs admin_api_key")


def _check_keys(name: str, keys: tuple[str, ...]) -> None:
    if any(not key.strip() or not key.isascii() or not key.isprintable() for key in keys):
        raise ValueError(f"{name}: a key must be printable ASCII, and not empty or blank")
    if any(key != key.strip() for key in keys):
        raise ValueError(f"{name}: a key begins or ends with a space, which no client can send")


def _names(api: tuple[str, ...]) -> tuple[str, ...]:
    """The names in `api`, where commas may stand between them; all without one. Raises ValueError for another name."""
    names = tuple(dict.fromkeys(name.strip() for given in api for name in given.split(",")))
    for name in names:
        if name not in APIS:
            raise ValueError(f"api: {name!r} is not one of {', '.join(APIS)}")
    return names or tuple(APIS)
