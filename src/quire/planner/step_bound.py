"""How long a step takes at least on hardware that one does not have: arithmetic, memory reads, and what ranks exchange.

    arithmetic   2 FLOP for each active parameter and token, 4 for each number of a head, query and key
    memory       the weights that the tokens need, once a micro-batch, and the keys and values that decode rows read
    links        two all-reduces of the residual stream a layer (tensor parallel), a send a stage (pipeline), tokens to
                 their experts and back (expert parallel)

A step takes the longer of arithmetic and memory, and then the links. A bound: no overhead, nothing overlaps with links.
With pipeline stages a batch is cut in as many micro-batches; each of them reads the weights of its stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.planner import formulas
from quire.planner.devices import Device, links
from quire.planner.model_size import ModelSize
from quire.records import dataclass

# Seconds that a collective takes at least, within a host and between hosts: assumed, as nobody states them.
NEAR_LATENCY, FAR_LATENCY = 8e-6, 25e-6


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How one replica is spread: `tensor` ranks share each layer, `pipeline` stages share the layers. `expert`: experts
    are shared by so many ranks, those of all replicas together, and not cut.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        words = [f"TP={self.tensor}", f"PP={self.pipeline}"] + [f"EP={self.expert}"] * (self.expert > 1)
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Seconds of the steps of one replica. `per_host`: devices that the fast link connects; `overhead`: seconds of
    each step beside the bound. Raises ValueError for a device without a rate of arithmetic.
    """

    model: ModelSize
    device: Device
    layout: RankLayout = RankLayout()
    bits: float = 16
    kv_bits: float = 16
    per_host: int = 8
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not self.peak:
            raise ValueError(f"device: {self.device.name} has no rate of arithmetic")

    @property
    def peak(self) -> float:
        """FLOP a second of one device. Weights of fewer bits are widened: the rate is that of 16 bits."""
        rates = self.device.tflops
        return (rates.get("bf16") or next(iter(rates.values()), 0.0)) * 1e12

    @property
    def weight_bytes(self) -> float:
        """Of each device. Experts are spread over more ranks than the rest with expert parallelism."""
        model, layout = self.model, self.layout
        width = 1e9 * self.bits / 8
        experts = model.expert_b / (layout.expert if layout.expert > 1 else layout.tensor)
        return width * ((model.params_b - model.expert_b) / layout.tensor + experts) / layout.pipeline

    @property
    def token_bytes(self) -> float:
        """Cache of one token on each device. KV heads are cut by tensor parallelism, but not finer than one head."""
        cut = min(self.layout.tensor, max(1, self.model.kv_heads))
        return self.model.kv_values * self.kv_bits / 8 / cut / self.layout.pipeline

    def room(self, reserve_gb: float) -> float:
        """Bytes for caches on each device."""
        return (self.device.memory_gb - reserve_gb) * 1e9 - self.weight_bytes

    def sequences(self, tokens: int, reserve_gb: float) -> int:
        """How many caches of `tokens` fit."""
        return max(0, int(self.room(reserve_gb) / (self.token_bytes * tokens)))

    def parts(self, features: Sequence[float]) -> tuple[float, float, float]:
        """Seconds of arithmetic, of memory and of links in a step, by cost_model.FEATURES."""
        _, rows, prompt, keys, work, *_, drafts = features
        tokens = rows + prompt + drafts
        if not tokens:
            return 0.0, 0.0, 0.0
        model, layout = self.model, self.layout
        per_pair = 4.0 * model.layers * model.heads * model.head_dim
        whole = tokens * 2e9 * model.active_b + (keys + work) * per_pair
        micro = min(layout.pipeline, max(1, int(tokens)))
        compute = whole / self.peak / layout.tensor / micro
        read = self._read(tokens / micro) * layout.pipeline
        cache = keys * self.token_bytes * layout.pipeline / micro
        bandwidth = self.device.bandwidth_gb_s * 1e9
        return compute, (read + cache) / bandwidth, self.link_seconds(tokens)

    def seconds(self, features: Sequence[float]) -> float:
        """Of a step."""
        compute, memory, exchanged = self.parts(features)
        return self.overhead + max(compute, memory) + exchanged

    def local_seconds(self, features: Sequence[float]) -> float:
        """Of a step, without what ranks exchange."""
        compute, memory, _ = self.parts(features)
        return self.overhead + max(compute, memory)

    def _read(self, tokens: float) -> float:
        """Bytes of weights of a stage that a device reads for so many tokens: of experts those that are chosen, by
        the tokens of all ranks that share them."""
        model = self.model
        if not model.experts:
            return self.weight_bytes
        chosen = 1 - (model.params_b - model.active_b) / model.expert_b
        touched = 1.0 - float((1.0 - chosen) ** (tokens * max(1, self.layout.expert)))
        layout, width = self.layout, 1e9 * self.bits / 8 / self.layout.pipeline
        experts = model.expert_b * touched / (layout.expert if layout.expert > 1 else layout.tensor)
        return width * ((model.params_b - model.expert_b) / layout.tensor + experts)

    def _link(self, ranks: int) -> tuple[float, float]:
        """Bytes a second and seconds of latency between so many ranks."""
        near = ranks <= self.per_host and self.device.link_gb_s
        rate = self.device.link_gb_s if near else links()["infiniband-ndr"]
        return rate * 1e9, NEAR_LATENCY if near else FAR_LATENCY

    def exchanged_bytes(self, tokens: float) -> dict[str, float]:
        """Bytes that each rank sends in a step, by what for."""
        model, layout = self.model, self.layout
        stream = tokens * model.hidden * 2.0
        found = {}
        if layout.tensor > 1:
            found["tensor"] = 2 * model.layers * formulas.all_reduce_bytes(stream, layout.tensor)
        if layout.pipeline > 1:
            found["pipeline"] = stream
        if layout.expert > 1 and model.experts:
            away = (layout.expert - 1) / layout.expert
            found["expert"] = 2 * model.layers * stream * self._experts_of_token() * away / layout.tensor
        return found

    def link_seconds(self, tokens: float) -> float:
        """What ranks exchange in a step."""
        model, layout, seconds = self.model, self.layout, 0.0
        for kind, size in self.exchanged_bytes(tokens).items():
            ranks = {"tensor": layout.tensor, "expert": layout.expert}.get(kind, self.per_host + 1)
            times = {"tensor": 2 * model.layers, "expert": 2 * model.layers}.get(kind, layout.pipeline - 1)
            rate, latency = self._link(ranks)
            seconds += times * latency + size * (1 if kind != "pipeline" else layout.pipeline - 1) / rate
        return seconds

    def _experts_of_token(self) -> float:
        model = self.model
        return model.experts * (1 - (model.params_b - model.active_b) / model.expert_b)

    def decode(self, batch: float, context: float) -> float:
        """A step that decodes `batch` sequences of `context` tokens."""
        return self.seconds(decoding(batch, context))

    def prefill(self, prompt: float) -> float:
        """A step that computes a prompt."""
        return self.seconds(prefilling(prompt))


def decoding(batch: float, context: float) -> Sequence[float]:
    """The features (cost_model.FEATURES) of a step that decodes `batch` sequences of `context` tokens."""
    return 1, batch, 0, batch * context, 0, 0, 0, 0


def prefilling(prompt: float) -> Sequence[float]:
    """Those of a step that computes a prompt."""
    return 1, 0, prompt, 0, prompt * prompt / 2, 0, 0, 0
