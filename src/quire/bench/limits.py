"""The limits of the machine, measured with the threads of the kernels during a benchmark.

The memory bandwidth of a virtual machine changes by a third within minutes, so limits are sampled between measurements,
and each measurement is compared with the samples around it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import field

from quire import _native
from quire.bench.environment import largest_cache
from quire.bench.results import MachineLimits, Spread, spread
from quire.records import dataclass
from quire.util.platform import available_memory, usable_cores

# name of a number format in results -> its measuring loop
LOOPS = {"f32": _native.DType.f32, "bf16": _native.DType.bf16, "i8": _native.DType.i8}
CACHES_READ = 8  # an arena of this many largest caches keeps nothing cached between passes
LEAST_ARENA = 256 << 20
PASSES = 3  # of each kind in one sample, which is their median
LOOP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class LimitsSample:
    """One measurement: bytes/s, and operations/s by number format."""

    bandwidth: float
    compute: dict[str, float]


def mean(first: LimitsSample, second: LimitsSample) -> LimitsSample:
    """The limits of a measurement between two samples."""
    compute = {name: (value + second.compute[name]) / 2 for name, value in first.compute.items()}
    return LimitsSample((first.bandwidth + second.bandwidth) / 2, compute)


@dataclass(slots=True)
class LimitsProbe:
    """Samples the limits of the machine and keeps all samples.

    `isa` "" is the best one of the machine; `formats` are the compute limits to measure. `arena` is the number of bytes
    that all threads together read in one bandwidth sample.
    """

    isa: str = ""
    threads: int = 0
    formats: tuple[str, ...] = tuple(LOOPS)
    arena: int = 0
    samples: list[LimitsSample] = field(default_factory=list)
    _core: _native.Executor = field(init=False)
    _memory: _native.BandwidthProbe = field(init=False)
    _iterations: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.threads = self.threads or usable_cores()
        self.arena = self.arena or min(
            max(LEAST_ARENA, CACHES_READ * largest_cache()), available_memory() // 4
        )
        self._core = _native.Executor(self.isa, self.threads)
        self._memory = _native.BandwidthProbe(self._core, self.arena)
        self.isa = self._core.isa
        for name in self.formats:
            self._iterations[name] = self._calibrate(LOOPS[name])

    def _calibrate(self, dtype: _native.DType) -> int:
        """Find the iterations that take about LOOP_SECONDS, which vary greatly between instruction sets."""
        iterations = 1000
        while True:
            start = time.perf_counter()
            _native.measure_flops(self._core, dtype, iterations)
            seconds = (time.perf_counter() - start) / 2  # one pass to warm up, one timed
            if seconds >= LOOP_SECONDS / 4:
                return max(1, int(iterations * LOOP_SECONDS / seconds))
            iterations *= 4

    def sample(self) -> LimitsSample:
        """Measure now."""
        bandwidth = statistics.median(self._memory.measure() for _ in range(PASSES))
        compute = {
            name: statistics.median(
                _native.measure_flops(self._core, LOOPS[name], count) for _ in range(PASSES)
            )
            for name, count in self._iterations.items()
        }
        found = LimitsSample(bandwidth, compute)
        self.samples.append(found)
        return found

    def limits(self) -> MachineLimits:
        """Median and spread of all samples; measures once if there are none."""
        if not self.samples:
            self.sample()
        compute = {name: spread([s.compute[name] for s in self.samples]) for name in self.formats}
        return MachineLimits(self.isa, self.threads, spread([s.bandwidth for s in self.samples]), compute)


def lines(limits: MachineLimits) -> list[str]:
    """Format the limits, for printing with every result."""
    found = limits.bandwidth
    text = [
        f"this machine ({limits.threads} threads, {limits.isa}; median of {found.count}, low to high):",
        f"  memory reads {_range(found, 'GB/s', 1)}",
    ]
    return text + [f"  {name} {_range(peak, 'GFLOP/s', 0)}" for name, peak in limits.compute.items()]


def _range(found: Spread, unit: str, digits: int) -> str:
    low, mid, high = (f"{value / 1e9:.{digits}f}" for value in (found.low, found.median, found.high))
    return f"{mid} {unit} ({low} to {high})"
