"""What slows this machine down, or limits it, before any request comes."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from quire.bench.doctor.cause import Cause
from quire.bench.environment import environment
from quire.bench.results import Noise
from quire.records import dataclass
from quire.util.platform import available_memory, meminfo, total_memory, usable_cores

_SYS = Path("/sys")
_FEW_FILES, _SLOW_MEMORY = 4096, 8e9
_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """What rules look at. Sizes are bytes, `bandwidth` bytes a second (0: not measured)."""

    cores: int
    usable_cores: int
    siblings: int  # hardware threads of a core
    threads: int  # QUIRE_THREADS, or 0
    isas: tuple[str, ...]
    memory: int
    available: int
    swap_used: int
    open_files: int
    governor: str
    cache_free: int
    noise: Noise
    bandwidth: float = 0.0


def machine_state(noise: Noise, cache: Path, bandwidth: float = 0.0) -> MachineState:
    """Look at this machine; `cache` is the folder of packed weights."""
    told = environment()
    while not cache.exists() and cache != cache.parent:
        cache = cache.parent
    threads = os.environ.get("QUIRE_THREADS", "")
    return MachineState(
        cores=told.cores,
        usable_cores=usable_cores(),
        siblings=len(_listed(_text(_SYS / "devices/system/cpu/cpu0/topology/thread_siblings_list"))) or 1,
        threads=int(threads) if threads.isdigit() else 0,
        isas=tuple(told.isas),
        memory=total_memory(),
        available=available_memory(),
        swap_used=meminfo("SwapTotal") - meminfo("SwapFree"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        governor=_text(_SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor").strip(),
        cache_free=shutil.disk_usage(cache).free,
        noise=noise,
        bandwidth=bandwidth,
    )


def examine(facts: MachineState) -> Iterator[Cause]:
    """What is wrong with a machine."""
    yield from _processors(facts)
    yield from _memory(facts)
    if facts.open_files < _FEW_FILES:
        yield Cause(
            name="few open files", says=f"A process may have {facts.open_files} files open, connections included.",
            evidence={"limit": facts.open_files}, suggestions=("ulimit -n 65536, or LimitNOFILE= of the unit",),
        )  # fmt: skip
    if facts.cache_free < 2 * _GIB:
        yield Cause(
            name="little disk", says=f"{facts.cache_free / _GIB:.1f} GiB are free where packed weights are kept.",
            evidence={"free_bytes": facts.cache_free}, suggestions=("another --weight-cache-dir", "--weight-cache off"),
        )  # fmt: skip


def _processors(facts: MachineState) -> Iterator[Cause]:
    if facts.noise.stolen > 0.05 * facts.cores:
        yield Cause(
            name="stolen CPU time", says=f"Another guest of this host takes {facts.noise.stolen:.2f} processors.",
            evidence={"stolen": facts.noise.stolen, "seconds": facts.noise.seconds},
            suggestions=("a machine with processors of its own",),
        )  # fmt: skip
    if facts.noise.others > 0.25 * facts.usable_cores:
        yield Cause(
            name="other work", says=f"Other programs of this machine take {facts.noise.others:.2f} processors.",
            evidence={"others": facts.noise.others, "usable": facts.usable_cores}, problem=False,
            suggestions=("nothing beside a server", "--threads lower by what they take"),
        )  # fmt: skip
    if facts.usable_cores < facts.cores:
        yield Cause(
            name="fewer cores", says=f"{facts.usable_cores} of {facts.cores} processors may be used.", problem=False,
            evidence={"usable": facts.usable_cores, "cores": facts.cores},
            suggestions=("the CPU limit of the container, or the affinity of the process",),
        )  # fmt: skip
    physical = max(1, facts.usable_cores // facts.siblings)
    if facts.threads > facts.usable_cores or 0 < facts.threads < physical:
        yield Cause(
            name="wrong thread count", evidence={"threads": facts.threads, "usable": facts.usable_cores},
            says=f"QUIRE_THREADS={facts.threads}, and {facts.usable_cores} processors may be used.",
            suggestions=(f"--threads {physical} to {facts.usable_cores}, or none, which takes all",),
        )  # fmt: skip
    if not any(isa != "baseline" for isa in facts.isas):
        yield Cause(
            name="no vector instructions", says="This processor has none of the instruction sets with fast kernels.",
            evidence={"isas": ", ".join(facts.isas)}, suggestions=("a processor with AVX2 or AVX-512",),
        )  # fmt: skip
    if facts.governor == "powersave":
        yield Cause(
            name="powersave", says="The frequency of the processors follows the load with a delay.", problem=False,
            evidence={"governor": facts.governor}, suggestions=("cpupower frequency-set -g performance",),
        )  # fmt: skip


def _memory(facts: MachineState) -> Iterator[Cause]:
    if facts.available < 0.1 * facts.memory:
        yield Cause(
            name="little memory", says=f"{facts.available / _GIB:.1f} of {facts.memory / _GIB:.1f} GiB are available.",
            evidence={"available": facts.available, "memory": facts.memory},
            suggestions=("a --memory below what is available", "fewer programs beside the server"),
        )  # fmt: skip
    if facts.swap_used > _GIB:
        yield Cause(
            name="swap", says=f"{facts.swap_used / _GIB:.1f} GiB are swapped out; weights may be among them.",
            evidence={"swap_used": facts.swap_used}, suggestions=("a smaller --memory", "swapoff -a on a server"),
        )  # fmt: skip
    if 0 < facts.bandwidth < _SLOW_MEMORY:
        yield Cause(
            name="slow memory", says=f"All threads together read {facts.bandwidth / 1e9:.1f} GB/s; every token of a "
            "stream reads all weights.", evidence={"bandwidth": facts.bandwidth},
            suggestions=("--quantization int8 or int4", "a machine with more memory channels"),
        )  # fmt: skip


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _listed(text: str) -> list[int]:
    """Numbers of a list like 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
