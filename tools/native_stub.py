"""Generates the types of the compiled module: python -m tools.native_stub rewrites them, a test compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUB = ROOT / "src" / "quire" / "_native.pyi"
# Types that the module's signatures leave open.
_PATTERNS = r"""
quire._native.Sampler.score:
    def score(self, logits: NDArray[numpy.float32], target_token_ids: NDArray[numpy.int32], count: int, maxima: NDArray[numpy.float32] | None) -> list[tuple[float, int, list[int], list[float]]] | None: ...

quire._native.Sampler.logprobs:
    def logprobs(self, row: int) -> tuple[float, int, list[int], list[float]]: ...

quire._native.GROUP_SIZES:
    GROUP_SIZES: tuple[int, ...]

quire._native.(ACTIVATIONS|GROUP_SCORES|NORM_KINDS|ROUTER_SCORES):
    \1: tuple[str, ...]
"""  # noqa: E501


def render(folder: Path) -> str:
    """The stub of the built module, made by nanobind's generator; `folder` is for its files."""
    patterns, made = folder / "patterns", folder / STUB.name
    patterns.write_text(_PATTERNS)
    command = ["nanobind.stubgen", "-q", "-m", "quire._native", "-p", str(patterns), "-o", str(made)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-q", "--config", str(ROOT / "pyproject.toml"), made],
        check=True,
    )
    return made.read_text()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        STUB.write_text(render(Path(folder)))
