"""Commands and request bodies put together from what somebody wants: `quire serve MODEL --port 9000 --threads 4`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .conversation import Check, Turn, assistant, user
from .draw import Draw
from .wording import expand, tidy, typed
from .words import ANIMALS, CITIES, FOODS, OBJECTS, invented


@dataclass(frozen=True, slots=True)
class Part:
    """A wish, and the option that fulfils it; {} stands for one of the values."""

    wish: str
    option: str
    values: tuple[str, ...] = ()


_PORTS = (
    "80",
    "3000",
    "5000",
    "7000",
    "8001",
    "8080",
    "8081",
    "8888",
    "9000",
    "9090",
    "12345",
    "8765",
    "4000",
    "5050",
)
_SERVE = (
    Part("(on|at|using) port {}", "--port {}", _PORTS),
    Part("(on|at|using) port {}", "--port {}", _PORTS),
    Part("(within|with|in at most|using at most) {} (GB|gigabytes) [of (memory|RAM)]", "--memory {}GB", ("1", "2", "3", "4", "6", "8", "10", "12", "16", "20", "24", "32", "48", "64")),
    Part("(within|with|in) {} [of memory]", "--memory {}", ("2GiB", "4GiB", "6GiB", "8GiB", "12GiB", "16GiB", "512MiB", "20GiB")),
    Part("(with|on|using) {} (threads|cores|CPU cores)", "--threads {}", ("2", "3", "4", "6", "8", "12", "16", "24", "32")),
    Part("(for|with) [at most] {} (users|requests|sequences) at once", "--max-num-seqs {}", ("1", "2", "4", "8", "10", "16", "20", "32", "100", "128")),
    Part("with a (context|context length|context window) of {} [tokens]", "--max-model-len {}", ("512", "1024", "2048", "4096", "8192", "16384", "32768", "1000", "5000")),
    Part("in (int8|8 bits|8 bit)", "--quantization int8"),
    Part("in (int4|4 bits|4 bit)", "--quantization int4"),
    Part("with an int8 (KV cache|cache)", "--kv-cache-dtype int8"),
    Part("with the (API key|key) {}", "--api-key {}", ("SECRET", "*")),
    Part("with the model name {}", "--served-model-name {}", ("small", "*")),
    Part("(for other machines|so that others can reach it|on all addresses)", "--host 0.0.0.0"),
    Part("with (debug logs|debug logging)", "--log-level debug"),
    Part("with (JSON logs|logs as JSON)", "--log-format json"),
    Part("with an access log", "--access-log"),
    Part("(without prefix caching|with prefix caching off)", "--no-enable-prefix-caching"),
    Part("with priority scheduling", "--scheduling-policy priority"),
)  # fmt: skip
_GENERATE = (
    Part("[with|at] temperature {}", "--temperature {}", ("0", "0.2", "0.3", "0.5", "0.7", "0.8", "0.9", "1", "1.2", "1.5")),
    Part("(with [at most]|in|up to) {} tokens", "--max-tokens {}", ("5", "10", "16", "20", "30", "32", "50", "64", "100", "128", "200", "256")),
    Part("with seed {}", "--seed {}", ("1", "2", "3", "5", "7", "11", "17", "42", "99", "123", "2024")),
    Part("with (top-k|top_k) {}", "--top-k {}", ("5", "10", "20", "40", "50")),
    Part("with (top-p|top_p) {}", "--top-p {}", ("0.5", "0.8", "0.9", "0.95")),
    Part("(with|and give me) {} samples", "--n {}", ("2", "3", "4", "5")),
    Part("as JSON", "--json"),
    Part("in int8", "--quantization int8"),
)  # fmt: skip
_FIELDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("[with|at] temperature {}", "temperature", (0, 0.2, 0.5, 0.7, 0.9, 1, 1.2)),
    ("(with [at most]|up to) {} tokens", "max_tokens", (10, 16, 20, 50, 64, 100, 128, 200)),
    ("with seed {}", "seed", (1, 2, 3, 7, 11, 42, 99, 123)),
    ("with (top_p|top-p) {}", "top_p", (0.5, 0.8, 0.9, 0.95)),
    ("(with streaming|streamed|as a stream)", "stream", (True,)),
    ("with {} samples", "n", (2, 3, 4, 5)),
)  # fmt: skip
_SERVE_ASKS = (
    "(How do I|how can I|how to) (serve|run|start|host) {model} {wishes}[?]", "(Serve|Run|Start|Host) {model} {wishes}[.]",
    "(Give me|What is|Show me|I need) the command to (serve|run|start) {model} {wishes}[.]", "command to serve {model} {wishes}[?]",
    "I (want|would like|need|have) to (serve|run|start) {model} {wishes}. (What do I type?|Which command?|How?)",
    "(Write|type) [me] the (quire|quire serve) command (to serve|for) {model} {wishes}[.]",
)  # fmt: skip
_GENERATE_ASKS = (
    '(How do I|how can I) continue "{prompt}" {wishes} [in the terminal|from the command line][?]', 'continue "{prompt}" {wishes} with quire generate',
    '(Give me|What is|Show me) the command to (generate from|continue) "{prompt}" {wishes}[.]', 'quire generate command for "{prompt}" {wishes}[?]',
    'I want to (generate from|continue|run) the prompt "{prompt}" {wishes}. (What do I type?|Which command?)',
)  # fmt: skip
_BODY_ASKS = (
    '(Give me|Show me|Write|I need) (a|the) (request body|JSON body|chat request|body of a chat request) that (says|sends|asks) "{prompt}" {wishes}[.]',
    '(What is the|what is) (request body|body) (for|to send) "{prompt}" {wishes}[?]', 'chat request body for "{prompt}" {wishes}[.]',
    'how do I send "{prompt}" {wishes} (over http|to /v1/chat/completions)[?]',
)  # fmt: skip
_STARTS = ("Once upon a time", "Hello", "Hi", "The {0}", "My {0} is", "In {2}", "What is a {0}?", "The KV cache is", "Tell me about {2}", "One day a {0}")  # fmt: skip


def _value(draw: Draw, part: Part) -> str:
    value = draw.pick(part.values) if part.values else ""
    return (
        invented(draw).lower() + (str(draw.below(100)) if draw.chance(0.5) else "") if value == "*" else value
    )


def _model(draw: Draw) -> tuple[str, str]:
    """How the model is named in the question, and in the command."""
    name = invented(draw).lower()
    size = draw.pick(("7b", "8b", "1b", "3b", "0.6b", "70b", "13b"))
    path = draw.pick((f"{name}.gguf", f"models/{name}", f"{name}/{draw.pick(('llama', 'qwen', name))}-{size}", f"{name}-{size}.gguf", "model.gguf", "path/to/model"))  # fmt: skip
    return draw.weighted((((path, path), 0.7), (("the server", ""), 0.2), (("a model", "MODEL"), 0.1)))


def _prompt(draw: Draw) -> str:
    return draw.pick(_STARTS).format(draw.pick((*ANIMALS, *OBJECTS)), draw.pick(FOODS), draw.pick(CITIES))


def _asked(draw: Draw, asks: Sequence[str], slots: dict[str, str], wishes: Sequence[tuple[str, str]]) -> str:
    """The question: the first slot and every value are copied by the answer, so no typing noise touches them."""
    kept = dict(slots)
    texts = []
    for i, (wish, value) in enumerate(wishes):
        texts.append(expand(draw, wish).replace("{}", f"{{v{i}}}"))
        kept[f"v{i}"] = value
    form = expand(draw, draw.pick(asks)).replace("{wishes}", draw.pick((" ", " and ", ", ")).join(texts))
    parts = tidy(form).replace("}", "{").split("{")
    return typed(draw, parts, kept)


def _distinct(draw: Draw, parts: Sequence[Part]) -> list[tuple[Part, str]]:
    """One to three parts of different options, with their values."""
    seen: dict[str, tuple[Part, str]] = {}
    for part in draw.sample(parts, draw.weighted(((1, 0.45), (2, 0.35), (3, 0.2)))):
        seen.setdefault(part.option.split()[0], (part, _value(draw, part)))
    return list(seen.values())


def _command(
    draw: Draw, head: str, asks: Sequence[str], slots: dict[str, str], parts: Sequence[Part]
) -> list[Turn]:
    chosen = draw.held(
        lambda: _distinct(draw, parts),
        lambda c: f"command|{head}|" + "|".join(p.option.format(v) for p, v in c),
    )
    said = " ".join([head, *(part.option.format(value) for part, value in chosen)])
    asked = _asked(draw, asks, slots, [(p.wish, v) for p, v in chosen])
    return [user(asked), assistant(said, Check("exact", {"text": said, "task": "command line"}))]


def _body(draw: Draw) -> list[Turn]:
    """The body of a chat request."""

    def make() -> tuple[str, list[tuple[str, str, Any]]]:
        fields = [(w, key, draw.pick(values)) for w, key, values in draw.sample(_FIELDS, draw.between(1, 3))]
        return _prompt(draw), fields

    prompt, fields = draw.held(make, lambda p: f"body|{p[0]}|" + "|".join(f"{k}={v}" for _, k, v in p[1]))
    body = {"messages": [{"role": "user", "content": prompt}]} | {key: value for _, key, value in fields}
    asked = _asked(draw, _BODY_ASKS, {"prompt": prompt}, [(w, str(v)) for w, _, v in fields])
    said = json.dumps(body)
    return [user(asked), assistant(said, Check("exact", {"text": said, "task": "request body"}))]


def question(draw: Draw) -> list[Turn]:
    """Somebody asks for a command or a request body."""
    kind = draw.weighted((("serve", 0.55), ("generate", 0.25), ("body", 0.2)))
    if kind == "body":
        return _body(draw)
    if kind == "serve":
        name, path = _model(draw)
        return _command(draw, f"quire serve {path}".rstrip(), _SERVE_ASKS, {"model": name}, _SERVE)
    prompt = _prompt(draw)
    return _command(
        draw, f'quire generate --prompt "{prompt}"', _GENERATE_ASKS, {"prompt": prompt}, _GENERATE
    )
