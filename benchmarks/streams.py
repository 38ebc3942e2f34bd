"""CPU of the API process for each streamed token, 64 streams at once; whether any starves; whether health answers.

python -m benchmarks.streams                     the real engine in its own process, a model of random weights
python -m benchmarks.streams --model FOLDER      the same with a checkpoint: two trees compare with one model only
python -m benchmarks.streams --bare              the real engine, and a constant written to a socket for each token
python -m benchmarks.streams --bare --api chat grpc   beside it a constant message for each token, written by grpcio
python -m benchmarks.streams --answers read      random weights; answers are read in parts (text, reasoning, calls)
python -m benchmarks.streams --answers thinking  the same, and all of them are reasoning
python -m benchmarks.streams --api chat tgi      several APIs in turns, and their ratios to the first
python -m benchmarks.streams --server quire hypercorn granian   servers in turns, all over HTTP/1.1

Clients run in a process of their own. CPU time is this process's, user and system, from the first request to the last
byte, so a request's own cost is in it. Much of it is waiting for memory: whatever else runs on the machine between
two steps, the engine's kernels among it, empties the caches, and the figure grows to twice of what it is when nothing
does. So it is comparable between runs of one machine in one state, and between APIs or servers that take turns in one
run; `--bare` in the same state is what sockets and waking readers cost there, and a loop over them in Python: the
floor. Detokenization is measured beside, on the same texts, and told apart. A stream's gap is the time between two
reads of its events by the client. In the last round health is asked for every 20 ms from another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import multiprocessing
import os
import random
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
import uvloop
from benchmarks.pairs import interval

from quire.bench.statistics import percentile
from quire.config import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import GenerateAsk
from quire.engine.build.opening import open_model
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.messages import SAMPLE_BITS, StepReport, unpack_handles
from quire.server.run import HttpServer, bind
from quire.server.service import Service
from quire.types import Request, SamplingParams, TokenIds

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "read": "{# <think></think> #}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "thinking": "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}<think>\n",
}


_SAID = [{"role": "user", "content": "Hi"}]
# API -> path, body of a request for a number of tokens, and what each event has once.
APIS: dict[str, tuple[str, Callable[[int], dict[str, Any]], bytes]] = {
    "chat": (
        "/v1/chat/completions",
        lambda n: {"messages": _SAID, "max_tokens": n, "seed": 7, "ignore_eos": True},
        b'"delta":',
    ),
    "responses": (
        "/v1/responses",
        lambda n: {"input": "Hi", "max_output_tokens": n, "store": False},
        b'"delta":',
    ),
    "anthropic": ("/v1/messages", lambda n: {"messages": _SAID, "max_tokens": n}, b'"delta":'),
    "ollama": ("/api/chat", lambda n: {"messages": _SAID, "options": {"num_predict": n}}, b'"done":false'),
    "llama-server": ("/completion", lambda n: {"prompt": "Hi", "n_predict": n}, b'"stop":false'),
    "tgi": (
        "/generate_stream",
        lambda n: {"inputs": "Hi", "parameters": {"max_new_tokens": n}},
        b'"token":',
    ),
    "sglang": ("/generate", lambda n: {"text": "Hi", "sampling_params": {"max_new_tokens": n}}, b'"text":'),
}


async def read_http(port: int, api: str, tokens: int) -> AsyncIterator[int]:
    """The events in each read of a streamed response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    path, asked, mark = APIS[api]
    body = json.dumps(asked(tokens) | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        part = await reader.read(2**18)
        assert part, "closed early"
        yield part.count(mark)
        tail = (tail + part)[-16:]
    writer.close()


async def read_realtime(port: int, tokens: int) -> AsyncIterator[int]:
    """The events in each read of a WebSocket on which one response is asked for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = "GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    writer.write(f"{head}sec-websocket-version: 13\r\nsec-websocket-key: {'A' * 22}==\r\n\r\n".encode())
    await reader.readuntil(b"session.created")
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    response = {"input": [item], "conversation": "none", "max_output_tokens": tokens}
    body = json.dumps({"type": "response.create", "response": response}).encode()
    # a frame of text under a mask of zeros
    writer.write(b"\x81\xfe" + len(body).to_bytes(2, "big") + bytes(4) + body)
    tail = b""
    while b'"response.done"' not in tail:
        part = await reader.read(2**18)
        assert part, "closed early"
        yield part.count(b'"delta":')
        tail = tail[-32:] + part
    writer.close()


async def read_grpc(port: int, tokens: int, *, apart: bool) -> AsyncIterator[int]:
    """The responses of an inference, one by one. `apart`: on a connection of its own; channels of grpcio share one."""
    import grpc.aio

    from quire.server.kserve.kserve_messages import CLASSES, SERVICE

    asked = CLASSES["ModelInferRequest"]()
    parameters = json.dumps({"max_tokens": tokens, "seed": 7, "ignore_eos": True})
    for name, kind, value in (
        ("text_input", "bytes", b"Hi"), ("stream", "bool", True),
        ("sampling_parameters", "bytes", parameters.encode()),
    ):  # fmt: skip
        tensor = asked.inputs.add(name=name, datatype={"bytes": "BYTES", "bool": "BOOL"}[kind], shape=[1])
        getattr(tensor.contents, kind).append(value)
    options = [("grpc.use_local_subchannel_pool", int(apart))]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter([asked.SerializeToString()]))
        async for _ in call:
            yield 1


def read_streams(ports: tuple[int, int], api: str, streams: int, tokens: int, done: Any) -> None:
    """All streams at once, read as bytes: events, when each stream ended, and the gaps between its reads. `ports` are
    those of HTTP and of gRPC.
    """
    gaps: list[float] = []
    ends: list[float] = []

    async def one() -> int:
        if api.startswith("grpc"):
            found = read_grpc(ports[1], tokens, apart=api == "grpc-apart")
        else:
            found = read_realtime(ports[0], tokens) if api == "realtime" else read_http(ports[0], api, tokens)
        chunks, last = 0, 0.0
        async for some in found:
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            chunks += some
        ends.append(last)
        return chunks

    async def everything() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))

    start = time.perf_counter()
    done.put((uvloop.run(everything()), sorted(gaps), sorted(end - start for end in ends)))


def ask_health(port: int, ending: Any, done: Any) -> None:
    """How long /health/ready takes while everything is busy."""
    seconds = []
    while not ending.wait(0.02):
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health/ready")
        assert connection.getresponse().status == 200
        connection.close()
        seconds.append(time.perf_counter() - start)
    done.put(sorted(seconds))


def share(values: list[float], part: float) -> float:
    """A quantile of sorted values, in milliseconds."""
    return 1e3 * percentile(values, 100 * part) if values else float("nan")


class Bare(AsyncEngine):
    """The real engine, and for each token of a step a constant event written to its socket: what is left when there
    is no text, no event to make, no metric and no back-pressure.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.files: dict[int, int] = {}  # the socket of each request, by its handle
        self.calls: dict[int, asyncio.Semaphore] = {}  # or what its call over gRPC waits for
        event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 190 + b'"}}]}\n\n'
        self.event = b"%x\r\n%b\r\n" % (len(event), event)

    def stepped(self, step: StepReport) -> None:
        handles = [key >> SAMPLE_BITS for key in unpack_handles(step.rows)]
        calls = [self.calls[handle] for handle in handles if handle in self.calls]
        for call in calls:
            call.release()
        if len(calls) == len(handles) and not (step.notes or step.started):
            return
        files = [self.files.get(handle) for handle in handles]
        if step.notes or step.started or None in files:
            super().stepped(step)
            return
        for file in files:
            os.write(file, self.event)  # type: ignore[arg-type]


def bare_requests(engine: Bare, tokens: int) -> Iterator[Any]:
    """The streams of as many requests as are asked for."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=7)
    for number in itertools.count():
        request = Request(request_id=str(number), prompt_token_ids=TokenIds([1, 2, 3]), params=params)
        yield engine.generate(GenerateAsk(request=request))


class BareGrpc:
    """grpcio's asynchronous server, whose calls write a constant message for each token."""

    def __init__(self, engine: Bare, requests: Iterator[Any], tokens: int) -> None:
        import grpc.aio

        message = b"x" * 100

        async def answer(_: Any, call: Any) -> None:
            await call.read()
            stream = next(requests)
            ready = engine.calls[stream._live.handle] = asyncio.Semaphore(0)
            first = asyncio.create_task(anext(stream))
            for _ in range(tokens):
                await ready.acquire()
                await call.write(message)
            await first
            del engine.calls[stream._live.handle]

        class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, _: Any) -> Any:
                return grpc.stream_stream_rpc_method_handler(answer)

        self._server = grpc.aio.server(handlers=[Handler()])
        self.port = self._server.add_insecure_port("127.0.0.1:0")

        self._starting: asyncio.Task[None] | None = None

    def start(self, sock: socket.socket) -> None:
        """Begin, on a port of its own."""
        sock.close()
        self._starting = asyncio.create_task(self._server.start())

    async def stop(self) -> None:
        await self._server.stop(0)


def bare(engine: Bare, requests: Iterator[Any]) -> Any:
    """An application that starts a response and leaves the rest to Bare."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "GET":  # health
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        stream = next(requests)
        handle = stream._live.handle
        async for delta in stream:
            await send({"type": "http.response.body", "body": engine.event, "more_body": True})
            if delta.finish_reason is None:
                engine.files[handle] = scope["quire.writer"].transport.get_extra_info("socket").fileno()
        del engine.files[handle]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def write_random_model(folder: Path, template: str) -> None:
    """Hidden 256, 6 layers, a vocabulary of 4,096 trained on this repository's own text; weights are random."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    root = Path(__file__).parents[1]
    tokenizer.train(
        [str(path) for room in ("docs", "src") for path in root.glob(f"{room}/**/*.[mp][dy]")], trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    # without a token that ends an answer: not every API can ask to go on
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def detokenizing(model: str, tokens: int) -> float:
    """Seconds of CPU to detokenize a token, one at a time, as a stream has them."""
    tokenizer = open_model(Path(model)).tokenizer
    assert tokenizer is not None
    chooser = random.Random(0)
    ids = [[chooser.randrange(3, 4000)] for _ in range(tokens)]
    best = float("inf")
    for _ in range(5):
        detokenizer = tokenizer.detokenizer(True)
        start = time.process_time()
        for one in ids:
            detokenizer.push(one)
        best = min(best, time.process_time() - start)
    return best / tokens


async def one_round(
    ports: tuple[int, int], api: str, args: argparse.Namespace, *, health: bool
) -> tuple[float, str]:
    """All streams once: microseconds of CPU a token, and all that it cost as a line."""
    spawn = multiprocessing.get_context("spawn")
    done, told, ending = spawn.Queue(), spawn.Queue(), spawn.Event()
    clients = [spawn.Process(target=read_streams, args=(ports, api, args.streams, args.tokens, done))]
    if health:
        clients.append(spawn.Process(target=ask_health, args=(ports[0], ending, told)))
    for client in clients:
        client.start()
    started = resource.getrusage(resource.RUSAGE_SELF)  # starting them is not serving them
    chunks, gaps, ends = await asyncio.to_thread(done.get)
    after = resource.getrusage(resource.RUSAGE_SELF)
    ending.set()
    asked = await asyncio.to_thread(told.get) if health else []
    for client in clients:
        await asyncio.to_thread(client.join)
    tokens = args.streams * args.tokens
    system = after.ru_stime - started.ru_stime
    cpu = after.ru_utime - started.ru_utime + system
    return cpu / tokens * 1e6, (
        f"{tokens} tokens in {chunks} events: {cpu / tokens * 1e6:.1f} µs a token"
        f" ({system / tokens * 1e6:.1f} in the kernel); streams ended after {ends[0]:.2f} to {ends[-1]:.2f} s,"
        f" gaps p50 {share(gaps, 0.5):.1f}, p99 {share(gaps, 0.99):.1f}, longest {share(gaps, 1):.1f} ms"
    ) + (
        f"; health p50 {share(asked, 0.5):.1f}, p99 {share(asked, 0.99):.1f} ms of {len(asked)}"
        if asked
        else ""
    )


@contextlib.asynccontextmanager
async def served(server: HttpServer, name: str) -> AsyncIterator[int]:
    """The port on which a server of this name runs the application."""
    app: Any = server._server.config.app
    sock = bind(ServingConfig(port=0))
    port: int = sock.getsockname()[1]
    if name == "quire":
        await server.start(sock)
        yield port
        await server.stop()
        return
    ending = asyncio.Event()
    if name == "hypercorn":
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"fd://{sock.detach()}"]
        running = asyncio.create_task(serve(app, config, shutdown_trigger=ending.wait))
    else:
        from granian.constants import Interfaces
        from granian.server.embed import Server

        sock.close()
        granian = Server(app, address="127.0.0.1", port=port, interface=Interfaces.ASGI)
        running = asyncio.create_task(granian.serve())
        await asyncio.sleep(1.0)
    yield port
    if name == "hypercorn":
        ending.set()
    else:
        granian.stop()
    await running


async def measure(args: argparse.Namespace, model: str) -> None:
    grpc_port = 0 if {"grpc", "grpc-apart"} & {*args.api} else None
    # of which gRPC has a part (engine/host/held)
    config = ServingConfig(port=0, grpc_port=grpc_port, max_connections=128 * args.streams)
    weights = "auto" if args.model else "random"
    options = EngineConfig(threads=args.threads, max_num_seqs=args.streams, load_format=weights)
    engine = (Bare if args.bare else AsyncEngine)(model, options, config)
    server = HttpServer(Service(engine, config), config)
    if isinstance(engine, Bare):
        requests = bare_requests(engine, args.tokens)
        server._server.config.app = bare(engine, requests)  # before it is loaded
        if server.grpc is not None:
            server.grpc = BareGrpc(engine, requests, args.tokens)  # type: ignore[assignment]
    turns = list(itertools.product(args.server, args.api))
    names = [" ".join(names) for names in turns]
    found: list[list[float]] = [[] for _ in turns]
    async with contextlib.AsyncExitStack() as stack:
        ports = {name: await stack.enter_async_context(served(server, name)) for name in args.server}
        grpc = 0 if server.grpc is None else server.grpc.port
        await engine.start()
        gc.freeze()  # as `quire serve` does
        for number in range(args.rounds + 2):  # the first warms up
            order = list(zip(names, turns, found, strict=True))
            # each goes first in its turn, and so is measured in each part of a round
            start = number % len(order)
            for name, (through, api), costs in order[start:] + order[:start]:
                cost, told = await one_round((ports[through], grpc), api, args, health=number > args.rounds)
                if number:
                    print(f"{name}: {told}", flush=True)
                if 0 < number <= args.rounds:
                    costs.append(cost)
        await engine.stop(0.0)
    for name, costs in zip(names, found, strict=True):
        middle, spread = statistics.median(costs), f"{min(costs):.1f} to {max(costs):.1f}"
        ratios = [cost / first for cost, first in zip(costs, found[0], strict=True)]
        low, high = interval([[ratio] for ratio in ratios])
        print(
            f"{name}: median {middle:.1f} ({spread}) µs a token, {statistics.median(ratios):.2f} of {names[0]} "
            f"in its round ({low:.2f} to {high:.2f})"
        )
    if not args.bare:
        print(f"of it detokenization: {detokenizing(model, 20_000) * 1e6:.2f} µs a token")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="checkpoint folder; default: random weights of the default model's shape"
    )
    parser.add_argument("--bare", action="store_true", help="no application: a constant for each token")
    parser.add_argument("--answers", choices=TEMPLATES, default="plain", help="of random weights")
    parser.add_argument(
        "--api",
        nargs="+",
        choices=[*APIS, "realtime", "grpc", "grpc-apart"],
        default=["chat"],
        help="what the clients speak, in turns; others than chat end where a checkpoint ends",
    )
    parser.add_argument("--server", nargs="+", choices=("quire", "hypercorn", "granian"), default=["quire"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if not args.model:
            write_random_model(Path(name), TEMPLATES[args.answers])
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}, {args.streams} streams of {args.tokens}, "
              f"{args.model or f'random weights, {args.answers} answers'}")  # fmt: skip
        uvloop.run(measure(args, args.model or name))


if __name__ == "__main__":
    main()
