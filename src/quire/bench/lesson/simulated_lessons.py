"""The simulations of the lesson that need the simulator, with their controls."""

from __future__ import annotations

from quire.bench.lesson import batches, pools, production, single
from quire.bench.lesson.plant import BATCHINGS
from quire.learn.catalog import device_control, model_control
from quire.learn.scene import Control, Simulation
from quire.planner.devices import links

_SEED = Control(name="seed", label="Seed", default=0, most=1_000_000)

SIMULATIONS: tuple[Simulation, ...] = (
    Simulation(
        number=6, name="latency-metrics", title="What a client measures", source="simulator",
        run=single.latency_metrics, speed=5,
        about="Time to the first token, between tokens, per token, and to the end: of one request among others that"
        " come with it.",
        controls=(
            Control(name="load", label="Requests at once", default=1, least=1, most=128),
            Control(name="prompt", label="Prompt", default=100, least=1, most=2000, unit="tokens"),
            Control(name="output", label="Output", default=50, least=1, most=500, unit="tokens"),
            model_control("Llama 3 8B"), device_control("l4"),
        ),
    ),
    Simulation(
        number=7, name="throughput-latency", title="Throughput and latency", source="simulator",
        run=single.throughput_latency,
        about="A larger batch gives more tokens a second to all, and fewer to each. A service level says how far.",
        controls=(
            Control(name="slo_ms", label="Service level", default=100, least=1, most=1000, unit="ms a token"),
            Control(name="prompt", label="Prompt", default=100, least=1, most=1000, unit="tokens"),
            Control(name="output", label="Output", default=50, least=2, most=200, unit="tokens"),
            model_control("Llama 3 8B"), device_control("l4"),
        ),
    ),
    Simulation(
        number=8, name="batching", title="Batching", source="engine", run=batches.batching, speed=2,
        about="The same arrivals under static, dynamic and continuous batching: on the scheduler with steps of 20 ms,"
        " and as requests that the running engine answers.",
        controls=(
            Control(name="rate", label="Arrivals", default=5.0, least=0.5, most=50.0, step=0.5, unit="a second"),
            Control(name="variance", label="Variance of the lengths", default=50, most=100, unit="%"),
            Control(name="requests", label="Requests", default=60, least=8, most=200), _SEED,
            Control(name="real", label="And as requests on this server", default=True),
        ),
    ),
    Simulation(
        number=15, name="pools", title="Prefill and decode apart", source="simulator", run=pools.pools, speed=2,
        about="Two cards for everything, or one for prompts and one for answers.",
        controls=(
            Control(name="mode", label="Cards", default=pools.MODES[0], choices=pools.MODES),
            Control(name="load", label="Arrivals", default=5.0, least=0.5, most=10.0, step=0.5, unit="a second"),
            device_control("h100"),
            Control(name="link", label="Link", default="infiniband-ndr", choices=tuple(links())), _SEED,
        ),
    ),
    Simulation(
        number=16, name="production", title="A production server", source="simulator", speed=2,
        run=production.production,
        about="Requests with a common prefix of 2,000 tokens come at a rate. What does each technique change?",
        controls=(
            Control(name="rate", label="Arrivals", default=10.0, least=0.5, most=50.0, step=0.5, unit="a second"),
            Control(name="gpus", label="GPUs", default=1, least=1, most=8),
            Control(name="layout", label="Several GPUs as", default=production.LAYOUTS[0], choices=production.LAYOUTS),
            model_control("Llama 2 7B"), device_control("h100"),
            Control(name="batching", label="Batching", default="continuous", choices=BATCHINGS),
            Control(name="prefix_cache", label="Prefix cache", default=False),
            Control(name="speculation", label="Speculation", default=False),
            Control(name="int8", label="INT8 weights", default=False),
            Control(name="paging", label="Paged cache", default=False),
            Control(name="chunking", label="Chunked prefill", default=False), _SEED,
        ),
    ),
)  # fmt: skip
