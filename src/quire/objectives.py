"""Service levels: upper bounds of the times of a request, and classes of service that promise them.

One definition for the load generator, for the live goodput gauge, and for admission and the controller of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.records import dataclass

# name of the objective -> the bounded figure of a request
OBJECTIVES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first, the request's mean",
    "itl": "inter-token latency, the 99th percentile of the request's gaps",
    "e2el": "end-to-end latency",
}
MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class SLO:
    """Upper bounds in milliseconds; None is unbounded. A value equal to its bound meets it.

    `share` is the share of requests that must meet them for a load to count as served (used by `sweep`).
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        for name in OBJECTIVES:
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < float("inf"):
                raise ValueError(f"goodput: {name}: {bound!r} is not a positive number of milliseconds")
        if not 0 < self.share <= 1:
            raise ValueError(f"slo-share: {self.share} is not above 0 and at most 1")

    @property
    def bounds(self) -> dict[str, float]:
        """The objectives that are set, in milliseconds."""
        return {name: getattr(self, name) for name in OBJECTIVES if getattr(self, name) is not None}

    def missed(self, seen: Mapping[str, float | None]) -> list[str]:
        """The objectives that a request missed, in order. `seen` are its times in seconds by objective, None where it
        has none: a request of one token has no TPOT and no ITL."""
        # the time is a sum of floats: a picosecond is no miss
        return [
            name
            for name, bound in self.bounds.items()
            if (at := seen.get(name)) is not None and at * 1e3 > bound + 1e-9
        ]

    def __str__(self) -> str:
        return " ".join(f"{name}:{bound:g}" for name, bound in self.bounds.items())


def parse_slo(words: Sequence[str], share: float = 0.9) -> SLO:
    """Parse an SLO from words like "ttft:500" "tpot:50" (milliseconds), the syntax of vLLM's bench; also "ttft:0.5s".

    Raises ValueError naming the word.
    """
    bounds: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, colon, value = word.replace("=", ":").partition(":")
        if not colon or name not in OBJECTIVES:
            raise ValueError(
                f"goodput: {word!r} does not have the form ttft:500; known objectives: {', '.join(OBJECTIVES)}"
            )
        if name in bounds:
            raise ValueError(f"goodput: {name} is given twice")
        try:
            number = value.removesuffix("ms")
            scale = 1e3 if number == value and value.endswith("s") else 1.0
            bounds[name] = float(number.removesuffix("s") if scale > 1 else number) * scale
        except ValueError:
            raise ValueError(f"goodput: {word!r}: {value!r} is not a number of milliseconds") from None
    if not bounds:
        raise ValueError("goodput: no objective given")
    return SLO(**bounds, share=share)


@dataclass(frozen=True, slots=True)
class ServiceTerms:
    """On what terms a request is served. `account` is charged under a fair policy, by its `weight`.

    `service_class` is the number of its class, 0 for the most urgent. `due` is when it should be answered, on the clock
    of its arrival. `expected_tokens` is the length of its output, where that is known. Within an account, what is used
    is counted by `tag`. What it computed is kept in the cache for `cache_seconds`, before what nobody asked to keep.
    `sent`: another engine waits for the blocks of its prompt; `coming`: another one has computed so many of them.
    """

    account: str = ""
    tag: str = ""
    weight: float = 1.0
    service_class: int = 0
    due: float | None = None
    expected_tokens: int | None = None
    cache_seconds: float = 0.0
    sent: bool = False
    coming: int = 0


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A class of service, and what it promises. With `guaranteed`, deadlines are kept even if every answer in it and
    before it has all its max_tokens."""

    name: str
    slo: SLO = SLO()
    guaranteed: bool = False


def parse_classes(texts: Sequence[str]) -> tuple[ServiceClass, ...]:
    """Classes from texts like "interactive:ttft=500ms,tpot=50ms" and "batch:", the most urgent first.

    Raises ValueError naming the text.
    """
    found: dict[str, ServiceClass] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        words = [word for word in rest.split(",") if word.strip()]
        guaranteed = "guaranteed" in words
        if not colon or not name.isidentifier():
            raise ValueError(f"slo: {text!r} does not have the form interactive:ttft=500ms,tpot=50ms")
        if name in found:
            raise ValueError(f"slo: {name} is given twice")
        bounds = [word for word in words if word != "guaranteed"]
        try:
            slo = parse_slo(bounds) if bounds else SLO()
        except ValueError as error:
            raise ValueError(f"slo: {name}: {str(error).removeprefix('goodput: ')}") from None
        found[name] = ServiceClass(name, slo, guaranteed)
    if len(found) > MAX_CLASSES:
        raise ValueError(f"slo: {len(found)} classes are over the limit of {MAX_CLASSES}")
    return tuple(found.values())


def class_policies(
    text: str, classes: Sequence[ServiceClass], known: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """The policy of all requests and that of each class, "" for the same, from a text like "fair,batch=sjf".

    Raises ValueError naming the part that is wrong.
    """
    usual, *rest = text.split(",")
    names, found = [one.name for one in classes], dict.fromkeys([one.name for one in classes], "")
    for policy in (usual, *(part.partition("=")[2] for part in rest)):
        if policy not in known:
            raise ValueError(f"scheduling_policy: {policy!r} is not one of {', '.join(known)}")
    for part in rest:
        name, _, policy = part.partition("=")
        if name not in found:
            raise ValueError(
                f"scheduling_policy: {name!r} is not a class of slo: {', '.join(names) or 'none'}"
            )
        if found[name]:
            raise ValueError(f"scheduling_policy: {name} is given twice")
        found[name] = policy
    return usual, tuple(found.values()) if rest else ()


@dataclass(frozen=True, slots=True)
class DegradeStep:
    """What a saturated server gives less of: its kind, and how much is left."""

    kind: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.kind}={self.value}" if self.value else self.kind


DEGRADE_KINDS = ("shed", "max_tokens", "speculation", "model")


def parse_degrade(texts: Sequence[str]) -> tuple[DegradeStep, ...]:
    """Steps from texts like "speculation=1", "max_tokens=256", "shed" and "model=small", in order.

    Raises ValueError naming the text.
    """
    found: dict[str, DegradeStep] = {}
    for text in texts:
        kind, _, value = text.partition("=")
        if kind not in DEGRADE_KINDS:
            raise ValueError(f"degrade: {text!r} is not one of {', '.join(DEGRADE_KINDS)}")
        if kind in found:
            raise ValueError(f"degrade: {kind} is given twice")
        least = {"max_tokens": 1, "speculation": 0}.get(kind)
        if least is not None and not (value.isascii() and value.isdigit() and least <= int(value) < 2**31):
            raise ValueError(
                f"degrade: {text!r}: {kind} needs a whole number from {least} on, like {kind}=64"
            )
        if bool(value) != (kind != "shed"):
            raise ValueError(f"degrade: {text!r}: {'takes no value' if value else 'needs a value'}")
        found[kind] = DegradeStep(kind, value)
    return tuple(found.values())


def class_of(tier: str | None, classes: Sequence[ServiceClass]) -> int | None:
    """The number of the class that a `service_tier` means: its name, or OpenAI's words. None for an unknown one.

    auto and default mean the class "default", or the first one; priority the first and flex the last.
    """
    names = [one.name for one in classes]
    if tier in names:
        return names.index(tier)
    usual = names.index("default") if "default" in names else 0
    return {None: usual, "auto": usual, "default": usual, "priority": 0, "flex": max(0, len(names) - 1)}.get(
        tier
    )
