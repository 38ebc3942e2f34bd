"""The simulations by name."""

from __future__ import annotations

from quire.learn import calculated, experiments, next_token
from quire.learn.catalog import device_control, model_control, precision_control
from quire.learn.offered import offered
from quire.learn.scene import Control, Scene, Simulation
from quire.util.likeness import did_you_mean


def _on_a_server(**_: object) -> Scene:
    raise ValueError(
        "lifecycle: a running server shows it: GET /learn/api/sim/lifecycle, or /learn in a browser"
    )


_ALL = (
    Simulation(
        number=1, name="lifecycle", title="The life of a request", source="engine", run=_on_a_server, speed=5,
        about="The server answers a question now, and its log says where the time went: six stages, of which it goes"
        " round the last four once a token.",
        controls=(
            Control(name="prompt", label="Question", default="What is TTFT?",
                    choices=("What is TTFT?", "What does the KV cache do?", "What is 2 + 3?")),
            Control(name="tokens", label="Most tokens", default=24, least=1, most=64),
        ),
    ),
    Simulation(
        number=2, name="decode-loop", title="The decode loop", source="engine", run=next_token.decode_loop,
        about="A step of decoding gives chances for every token; temperature, top-k and top-p shape them before one is"
        " drawn.",
        controls=(
            Control(name="temperature", label="Temperature", default=1.0, most=2.0, step=0.05),
            Control(name="top_k", label="Top-k (0: all)", default=0, most=5),
            Control(name="top_p", label="Top-p", default=1.0, least=0.05, most=1.0, step=0.05),
        ),
    ),
    Simulation(
        number=3, name="phases", title="Prefill and decode", source="calculators", run=calculated.phases,
        about="Prefill computes all tokens of the prompt together and is bound by arithmetic; decode reads all weights"
        " for each token and is bound by memory.",
        controls=(
            Control(name="prompt", label="Prompt", default=500, least=1, most=131_072, unit="tokens"),
            Control(name="output", label="Output", default=200, least=1, most=8192, unit="tokens"),
            model_control("Llama 3 8B"), precision_control(), device_control("h100"),
        ),
    ),
    Simulation(
        number=4, name="kv-growth", title="The KV cache grows", source="calculators", run=calculated.kv_growth,
        about="Every token of every sequence adds keys and values. With long contexts they outgrow the weights.",
        controls=(
            Control(name="tokens", label="Context", default=4096, least=1, most=1_048_576, unit="tokens"),
            model_control("Llama 3 70B"),
            Control(name="kv_heads", label="KV heads (0: the model's own)", default=0, most=128),
            Control(name="batch", label="Sequences", default=1, least=1, most=512),
        ),
    ),
    Simulation(
        number=5, name="memory-hierarchy", title="The memory hierarchy", source="calculators",
        run=calculated.memory_hierarchy,
        about="Each level is larger and slower than the one above. What moves a byte less often is faster.",
        controls=(Control(name="level", label="Level", default="HBM3", choices=calculated.level_names()),),
    ),
    Simulation(
        number=9, name="attention-tiling", title="Attention in tiles", source="engine",
        run=experiments.attention_tiling,
        about="Naive attention writes the whole matrix of scores to memory and reads it again. Tiles stay in fast"
        " memory, with the same result: the engine's kernel, run at a tile of your choice.",
        controls=(
            Control(name="tokens", label="Sequence", default=2048, least=64, most=4096, step=1, unit="tokens"),
            Control(name="tile", label="Tile", default=256, least=16, most=1024, unit="rows and columns"),
        ),
    ),
    Simulation(
        number=10, name="block-table", title="Block tables", source="engine", run=experiments.block_table,
        about="A contiguous cache sets aside the longest answer for each sequence. Blocks are taken as tokens come, and"
        " need not be neighbours.",
        controls=(
            Control(name="mode", label="Memory", default="paged", choices=("contiguous", "paged")),
            Control(name="sequences", label="Sequences", default=4, least=1, most=24),
            Control(name="finished", label="Finished since", default=0, most=12),
        ),
    ),
    Simulation(
        number=11, name="speculation", title="Speculative decoding", source="engine", run=experiments.speculation,
        about="A small model drafts tokens, the large one checks them in one step and adds a token of its own.",
        controls=(
            Control(name="gamma", label="Drafts of a round (γ)", default=5, most=16),
            Control(name="alpha", label="Acceptance (α)", default=0.8, most=1.0, step=0.01),
            Control(name="draft_ms", label="A draft takes", default=2.0, most=100.0, step=0.1, unit="ms"),
            Control(name="target_ms", label="A step takes", default=35.0, least=0.1, most=1000.0, step=0.1, unit="ms"),
            Control(name="rounds", label="Rounds", default=2000, least=10, most=10_000),
            Control(name="seed", label="Seed", default=0, most=1_000_000),
            Control(name="real", label="And real drafts on this server", default=False),
        ),
    ),
    Simulation(
        number=12, name="memory", title="Does it fit?", source="calculators", run=calculated.memory_calculator,
        about="Weights take parameters times bits. What is left of a device holds the caches of its users.",
        controls=(model_control("Llama 3 70B"), precision_control("INT4"), device_control("rtx5090")),
    ),
    Simulation(
        number=13, name="parallelism", title="One model on several devices", source="calculators",
        run=calculated.parallelism,
        about="Tensor parallelism cuts matrices, pipeline parallelism layers, expert parallelism experts; data"
        " parallelism copies all.",
        controls=(
            Control(name="strategy", label="Parallelism", default="tensor", choices=calculated.STRATEGIES),
            Control(name="devices", label="Devices", default=4, least=1, most=16),
            Control(name="copies", label="Copies of all that", default=1, least=1, most=8),
            model_control("Llama 3 70B"), device_control("h100"),
        ),
    ),
    Simulation(
        number=14, name="prefix-cache", title="A cached prefix", source="engine", run=calculated.prefix_timeline,
        about="A prompt whose beginning is in the cache computes only what is new.",
        controls=(
            Control(name="prefix", label="Shared prefix", default=2000, least=1, most=131_072, unit="tokens"),
            Control(name="new", label="New tokens", default=80, least=1, most=8192, unit="tokens"),
            Control(name="cached", label="In the cache", default=True),
            Control(name="ms_per_token", label="Prefill of a token", default=0.5, least=0.001, most=100.0, step=0.001,
                    unit="ms"),
        ),
    ),
)  # fmt: skip


def simulations() -> dict[str, Simulation]:
    """All simulations by name, in the order of their numbers."""
    found = [*_ALL, *offered(Simulation)]
    return {one.name: one for one in sorted(found, key=lambda one: one.number)}


def simulation(name: str) -> Simulation:
    """The simulation of a name or a number. Raises ValueError for an unknown one."""
    known = simulations()
    for one in known.values():
        if name in {one.name, str(one.number)}:
            return one
    raise ValueError(f"name: no simulation {name!r}{did_you_mean(name, known)}")
