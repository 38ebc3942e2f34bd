"""The machine of a benchmark, and the load of other processes during the run."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire import __version__, _native
from quire.bench.results import Environment, Noise
from quire.util.platform import usable_cores
from quire.util.sizes import parse_size

_PACKAGES = ("numpy", "tokenizers", "msgspec", "uvicorn", "torch")
_CPU = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")


def environment(packages: tuple[str, ...] = _PACKAGES) -> Environment:
    """Describe this machine and installation, without users, hosts or paths."""
    info = _text(_PROC / "cpuinfo")
    return Environment(
        quire=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(info),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        virtual=bool(re.search(r"^flags\b.*\bhypervisor\b", info, re.MULTILINE)),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        caches=_caches(),
        isas=_native.supported_isas(),
        packages={name: found for name in packages if (found := _version(name))},
    )


def _cpu_name(info: str) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _caches() -> dict[str, int]:
    """Bytes of each cache of the first core, by name."""
    found: dict[str, int] = {}
    for index in sorted((_CPU / "cpu0" / "cache").glob("index*")):
        level, kind, size = (_text(index / name).strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size:
            found[f"L{level}{'d' if kind == 'Data' else ''}"] = parse_size(size)
    return found


def largest_cache() -> int:
    """Bytes of the largest cache; 32 MiB if the system does not report it."""
    return max(_caches().values(), default=32 << 20)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Watch:
    """Counts the CPU time of other processes and the hypervisor from now on.

    Child processes that have ended count as this one. Without /proc, all counts are 0.
    """

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._busy, self._own, self._stolen = _cpu_seconds()

    def stop(self) -> Noise:
        """Return the CPU time since the start, in CPUs."""
        seconds = max(time.monotonic() - self._time, 1e-3)
        busy, own, stolen = _cpu_seconds()
        others = max(0.0, (busy - self._busy) - (own - self._own)) / seconds
        return Noise(round(others, 3), round((stolen - self._stolen) / seconds, 3), round(seconds, 3))


def _cpu_seconds() -> tuple[float, float, float]:
    """CPU seconds: all processes since boot, this one and its ended children, and time stolen by the hypervisor."""
    line = _text(_PROC / "stat").partition("\n")[0].split()
    if len(line) < 9:
        return 0.0, 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = (int(word) / tick for word in line[1:9])
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return user + nice + system + irq + softirq, own, steal


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
