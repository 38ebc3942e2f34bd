"""The options of a router, beside those of its address, and the file that describes its backends."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.config.option import check_options, option
from quire.config.semantic import parse_semantic
from quire.records import dataclass
from quire.routing.difficulty import DifficultyRule, read_difficulty
from quire.routing.reported_prefixes import SOURCES
from quire.routing.router_policies import POLICIES
from quire.routing.traffic import RuleBody, TrafficRule, TrafficRules, named_by

# Sections of the options: first field -> title.
SUBJECTS = {
    "backend": "servers", "health_interval": "checks and failures", "prefix_index_size": "servers",
    "prefill": "prompts computed elsewhere", "hold_seconds": "servers that come and go",
    "semantic_cache": "questions asked before",
}  # fmt: skip
_FIELDS = {
    "url", "name", "weight", "models", "api_key", "api_key_file", "health", "admin_url", "admin_key_file", "role",
    "peer", "group",
}  # fmt: skip
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"kubernetes:(?:(?P<namespace>{_LABEL})/)?(?P<name>{_LABEL})(?::(?P<port>{_LABEL}))?")
ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Where a router passes requests to, and how. Times in seconds. Raises ValueError naming the field."""

    backend: tuple[str, ...] = option(
        (), "addresses of the servers that answer, such as http://host:8000", metavar="URL"
    )
    backends_file: str | None = option(
        None,
        "TOML file of servers with their names, weights, models and keys; read again on SIGHUP",
        metavar="FILE",
    )
    discover: tuple[str, ...] = option(
        (), "services of Kubernetes whose ready endpoints are servers, followed with the account of the router's pod; "
        "the port is a name or a number (default: http, or the first)", metavar="kubernetes:[NAMESPACE/]SERVICE[:PORT]",
    )  # fmt: skip
    backend_api_key_file: str | None = option(
        None,
        "file with the key that the router presents to servers (default: it passes on that of the client)",
        metavar="FILE",
    )
    backend_admin_key_file: str | None = option(
        None,
        "file with an administrator's key of the servers, by which the router follows what they have cached",
        metavar="FILE",
    )
    prefix_source: str = option(
        "hybrid",
        "how the router knows what is cached; predicted: by the prompts that it has sent; reported: by the servers' "
        "events alone; hybrid: by events, and where there are none by prompts",
        choices=SOURCES,
    )
    weights: str = option(
        "any", "one: where servers have several versions of the weights of a model, clients get answers of one alone, "
        "which changes when no server has it any more, or another one has more of them",
        choices=("any", "one"),
    )  # fmt: skip
    policy: str = option("prefix", "which server answers a request", choices=tuple(POLICIES))
    health_interval: float = option(1.0, "seconds between two checks of a server", metavar="S")
    health_timeout: float = option(5.0, "seconds after which a check has failed", metavar="S")
    connect_timeout: float = option(5.0, "seconds for connecting to a server", metavar="S")
    first_byte_timeout: float = option(600.0, "seconds until a server begins its answer", metavar="S")
    retries: int = option(
        2, "other servers that a request is sent to when one fails before its answer", metavar="N"
    )
    resume: bool = option(
        True, "let another server go on with a stream whose server is lost; its text stays the same"
    )
    hedge_share: float = option(
        0.0, "share of the work that may be done twice: a chat or completion whose answer is late, and has not begun, "
        "is sent to a second server, and the first answer is taken", metavar="P",
    )  # fmt: skip
    breaker_failures: int = option(
        3, "failures in a row after which a server gets no requests for a while", metavar="N", count=True
    )
    max_ejected: float = option(
        0.34, "share of the servers of a model that may get no requests for a while because they are far slower than "
        "the others, or fail far more often; 0: none", metavar="P",
    )  # fmt: skip
    prefix_index_size: int = option(
        65536,
        "pieces of 256 bytes that are remembered of the prompts of each server",
        metavar="N",
        count=True,
    )
    prefill: tuple[str, ...] = option(
        (),
        "addresses of servers that compute prompts for the others; both have --kv-tiers with a role",
        metavar="URL",
    )
    kv_key_file: str | None = option(
        None, "file with the key that the servers have, in --router or in --kv-tiers remote: without it no prompt is "
        "computed elsewhere, and lost streams are computed from their first token",
        metavar="FILE",
    )  # fmt: skip
    prefill_over: int = option(
        256, "tokens that a prompt has at least that is computed elsewhere", metavar="N", count=True
    )
    prefill_timeout: float = option(
        30.0, "seconds after which the server that answers computes a prompt itself", metavar="S"
    )
    hold_seconds: float = option(
        0.0, "seconds that a request waits while no server is available, such as one that is being started", metavar="S"
    )  # fmt: skip
    level_seconds: float = option(
        2.0, "seconds in which prompts should be computed; quire_router_replicas_needed says how many servers that "
        "takes", metavar="S",
    )  # fmt: skip
    start_seconds: float = option(
        60.0, "seconds that a server takes to start: so far ahead the load is forecast", metavar="S"
    )
    semantic_cache: str | None = option(
        None, "answer chats of temperature 0 whose question is nearly the same as an earlier one of the same tenant, "
        "with vectors of a server of embeddings: url=URL, and threshold=S, size=SIZE, seconds=S, …",
        metavar="url=URL,…",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        for name in (
            "health_interval",
            "health_timeout",
            "connect_timeout",
            "first_byte_timeout",
            "prefill_timeout",
            "level_seconds",
            "start_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not above 0")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries} is below 0")
        for name in ("hedge_share", "max_ejected"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not in [0, 1]")
        if self.hold_seconds < 0:
            raise ValueError(f"hold_seconds: {self.hold_seconds!r} is below 0")
        if not (self.backend or self.backends_file or self.discover or self.kv_key_file):
            raise ValueError(
                "backend: name at least one server, or a backends_file, or a service to discover, or a kv_key_file by "
                "which servers announce themselves"
            )
        discovered_services(self)
        if self.semantic_cache is not None:
            parse_semantic(self.semantic_cache)
        if self.prefill and self.kv_key_file is None:
            raise ValueError("prefill: needs kv_key_file, by which servers know their router")


@dataclass(frozen=True, slots=True)
class DiscoveredService:
    """A service of Kubernetes. `namespace` "" is that of the pod, `port` "" the one of the name http, or the first."""

    name: str
    namespace: str = ""
    port: str = ""


def discovered_services(config: RouterConfig) -> list[DiscoveredService]:
    """The services whose endpoints are servers. Raises ValueError."""
    found = []
    for text in config.discover:
        made = _SERVICE.fullmatch(text)
        if made is None:
            raise ValueError(
                f"discover: {text!r} does not have the form kubernetes:[NAMESPACE/]SERVICE[:PORT]"
            )
        found.append(DiscoveredService(made["name"], made["namespace"] or "", made["port"] or ""))
    return found


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A server behind a router. `models` are those it is asked for; None: those that it names itself. `health` is the
    path that says whether it answers; "" for the first that it has of /health and /v1/models. `admin_url`: where its
    routes for administrators are, if that is another address. `role`: "prefill" computes prompts for others, and
    answers only if nobody else can; "both" does both; "decode" and "" answer. `peer`: it is the router of another
    place, which does not send back what it gets from here. `group`: of servers whose number follows one load.
    """

    url: str
    name: str
    weight: float = 1.0
    models: tuple[str, ...] | None = None
    api_key: str = ""
    health: str = ""
    admin_url: str = ""
    admin_key: str = ""
    role: str = ""
    peer: bool = False
    group: str = ""


def backend_entries(config: RouterConfig) -> list[BackendEntry]:
    """The servers of a router. Raises ValueError for a file that cannot be read, naming the entry and the field."""
    key, admin = keys_of(config)
    found = [
        BackendEntry(url, f"backend-{number}", api_key=key, admin_key=admin)
        for number, url in enumerate(config.backend, 1)
    ]
    found += [
        BackendEntry(url, f"prefill-{number}", api_key=key, admin_key=admin, role="prefill")
        for number, url in enumerate(config.prefill, 1)
    ]
    if config.backends_file is not None:
        entries = _document(config.backends_file)["backend"]
        found += [_entry(number, entry, key, admin) for number, entry in enumerate(entries, len(found) + 1)]
    if not found and not (config.discover or config.kv_key_file):
        raise ValueError("backends_file: it names no server")
    for each in found:
        if each.role in {"prefill", "both"} and config.kv_key_file is None:
            raise ValueError(
                f"backends_file: {each.name}: role: {each.role!r} needs kv_key_file, by which servers know their router"
            )
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"backends_file: two servers are named {name!r}")
    return found


def keys_of(config: RouterConfig) -> tuple[str, str]:
    """The keys that the router presents to servers without ones of their own: to ask them, and as an administrator.
    Raises ValueError."""
    files = {name: getattr(config, name) for name in ("backend_api_key_file", "backend_admin_key_file")}
    key, admin = ("" if path is None else read_key(name, path) for name, path in files.items())
    return key, admin


class DifficultyBody(msgspec.Struct, forbid_unknown_fields=True):
    """A file of `quire train-router`, the models for easy and for hard requests, and from which probability on that the
    small model suffices a request is easy; None: as the file says."""

    file: str
    easy: str
    hard: str
    threshold: float | None = None

    def rule(self, folder: Path) -> DifficultyRule:
        """The rule that it describes. Raises ValueError."""
        try:
            model = read_difficulty((folder / self.file).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"difficulty: file: {self.file}: {error}") from None
        threshold = model.threshold if self.threshold is None else self.threshold
        if not 0 <= threshold <= 1:
            raise ValueError(f"difficulty: threshold: {threshold!r} is not in [0, 1]")
        if self.easy == self.hard:
            raise ValueError(f"difficulty: easy and hard are both {self.easy!r}")
        return DifficultyRule(model, self.easy, self.hard, threshold)


class RouterRuleBody(RuleBody):
    """A rule of a router, which has targets by weight or by the difficulty of the request."""

    targets: dict[str, float] = msgspec.field(default_factory=dict)
    difficulty: DifficultyBody | None = None

    def rule_in(self, folder: Path) -> TrafficRule:
        """The rule that it describes; files are found from a folder. Raises ValueError."""
        made = self.rule()
        if self.difficulty is None:
            return made
        if self.targets:
            raise ValueError("targets and difficulty exclude each other")
        rule = self.difficulty.rule(folder)
        return replace(made, targets=((rule.easy, 1.0), (rule.hard, 1.0)), difficulty=rule)


def traffic_rules(config: RouterConfig) -> TrafficRules:
    """What names stand for, by the file of servers; what has no rule there is a model. Raises ValueError."""
    rules = {} if config.backends_file is None else _document(config.backends_file).get("rules", {})
    folder = Path(config.backends_file or "").parent
    try:
        bodies = msgspec.convert(rules, dict[str, RouterRuleBody])
        made = {name: body.rule_in(folder) for name, body in bodies.items()}
        return TrafficRules(made, {name for rule in made.values() for name in named_by(rule)} - made.keys())
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"backends_file: rules: {error}") from None


def _document(file: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"backends_file: cannot be read: {error}") from None
    if not isinstance(document.get("backend"), list) or not document.keys() <= {"backend", "rules"}:
        raise ValueError("backends_file: it consists of [[backend]] tables, and of [rules.NAME]")
    return document


def _entry(number: int, entry: Any, key: str, admin: str) -> BackendEntry:
    where = f"backends_file: backend {number}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: is not a table")
    for name in entry.keys() - _FIELDS:
        raise ValueError(f"{where}: {name!r} is not one of {', '.join(sorted(_FIELDS))}")
    for name in (
        "url",
        "name",
        "api_key",
        "api_key_file",
        "health",
        "admin_url",
        "admin_key_file",
        "role",
        "group",
    ):
        if not isinstance(entry.get(name, ""), str):
            raise ValueError(f"{where}: {name}: is not a text")
    if not entry.get("url"):
        raise ValueError(f"{where}: url: missing")
    if entry.get("role", "both") not in ROLES:
        raise ValueError(f"{where}: role: {entry['role']!r} is not one of {', '.join(ROLES)}")
    if not isinstance(entry.get("peer", False), bool):
        raise ValueError(f"{where}: peer: {entry['peer']!r} is not true or false")
    weight, models = entry.get("weight", 1.0), entry.get("models")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1000:
        raise ValueError(f"{where}: weight: {weight!r} is not a number above 0 and up to 1000")
    if models is not None and not (
        isinstance(models, list) and models and all(isinstance(m, str) for m in models)
    ):
        raise ValueError(f"{where}: models: is not a list of names")
    if "api_key_file" in entry:
        key = read_key(f"{where}: api_key_file", entry["api_key_file"])
    if "admin_key_file" in entry:
        admin = read_key(f"{where}: admin_key_file", entry["admin_key_file"])
    return BackendEntry(
        entry["url"], entry.get("name", f"backend-{number}"), float(weight), None if models is None else tuple(models),
        entry.get("api_key", key), entry.get("health", ""), entry.get("admin_url", ""), admin,
        entry.get("role", ""), entry.get("peer", False), entry.get("group", ""),
    )  # fmt: skip


def read_key(field: str, path: str) -> str:
    """The key in a file. Raises ValueError naming the field."""
    try:
        key = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{field}: cannot be read: {error}") from None
    if not key or not key.isprintable() or len(key.split()) != 1:
        raise ValueError(f"{field}: it does not contain one key")
    return key
