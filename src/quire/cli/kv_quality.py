"""What a lossy `--kv-cache-dtype` costs, said when a command starts.

It is measured once for a model and its formats, by `quire eval kl` in a process of its own, and kept in the cache
folder, so that later starts only read it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import env
from quire.types import QuireError
from quire.util.standard_error import say

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig

_EXACT = ("auto", "float32", "bfloat16", "float16")
MAX_KL = 0.1  # as offline.gate has it
TOKENS = 512  # of each text: formats that keep the latest tokens exact show what they cost only behind them
# Options that change the numbers, or that measuring needs.
_TAKEN = ("dtype", "kv_cache_dtype", "kv_cache_scales", "quantization", "quantization_group_size", "quantize_head",
          "fp32_lm_head", "memory", "threads", "executor", "device", "attention_backend", "block_size", "weight_cache",
          "weight_cache_dir")  # fmt: skip


def check_kv_quality(name: str | Path, asked: EngineConfig, *, quiet: bool) -> None:
    """Print the loss of the KV cache's format, measuring it the first time. Returns at once for an exact format.

    Raises QuireError when it is above the limit, unless `kv_cache_quality` accepts that.
    """
    formats = asked.formats
    if formats.kv_cache_dtype in _EXACT or formats.kv_cache_quality == "off":
        return
    from quire.cli.eval_tasks import option_words

    words = option_words(asked, _TAKEN)
    place = _place(name, words, formats.kv_cache_scales)
    found = None if place is None else _read(place)
    if found is None:
        if not quiet:
            kind = formats.kv_cache_dtype
            say(f"quire: measuring what the {kind} KV cache costs (once; --kv-cache-quality off skips it)")
        found = _measure(name, words)
        if found is None:
            return
        if place is not None:
            _keep(place, found)
    if not quiet:
        say(f"quire: {_line(formats.kv_cache_dtype, found)}")
    kl = found["kl_mean"]
    if kl > MAX_KL and formats.kv_cache_quality != "force":
        raise QuireError(
            f"kv_cache_dtype: {formats.kv_cache_dtype} changes this model's predictions by a mean KL divergence of "
            f"{kl:.3f}, above the limit of {MAX_KL}: use a format of more bits, or --kv-cache-quality force"
        )


def _line(kind: str, found: dict[str, float]) -> str:
    before, after = found.get("original_perplexity"), found.get("perplexity")
    perplexity = "" if after is None else f"perplexity {before:.3f} -> {after:.3f}, "
    return (
        f"KV cache {kind}: {perplexity}KL mean {found['kl_mean']:.4f}, p99 {found['kl_p99']:.3f}, same top-1 "
        f"{found['top1_agreement']:.1%}"
    )


def _measure(name: str | Path, words: list[str]) -> dict[str, float] | None:
    """The figures; None, with a message, for a model that cannot be measured, such as one without a tokenizer."""
    command = [
        sys.executable,
        "-m",
        "quire",
        "eval",
        "kl",
        str(name),
        "--tokens",
        str(TOKENS),
        "--force",
        "--quiet",
    ]
    done = subprocess.run([*command, "--json", *words], capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        say(
            f"quire: the loss of the KV cache could not be measured: {' '.join(reason).removeprefix('quire: ')}"
        )
        return None
    metrics = json.loads(done.stdout)["metrics"]
    return {name: metric["value"] for name, metric in metrics.items() if metric["value"] is not None}


def _place(name: str | Path, words: list[str], scales: str | None) -> Path | None:
    """Where the figures are kept: by the checkpoint's files, those of scales, the options and the version."""
    from quire import __version__
    from quire.engine.build.opening import find_model
    from quire.loader import checkpoint_files, fingerprint

    folder = env.cache_folder()
    if folder is None:
        return None
    model = find_model(name)
    files = [model] if model.is_file() else [model / "config.json", *checkpoint_files(model)]
    files += [Path(scales)] if scales and Path(scales).is_file() else []
    counted = [word for word in words if not word.startswith(("--memory", "--threads"))]
    text = json.dumps([__version__, fingerprint(files), counted, TOKENS])
    return folder / "quality" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _read(place: Path) -> dict[str, float] | None:
    """The figures that were kept; None if there are none, or no such file."""
    try:
        found: Any = json.loads(place.read_bytes())
        return {name: float(found[name]) for name in found if found[name] is not None}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _keep(place: Path, found: dict[str, float]) -> None:
    """A folder that cannot be written only costs another measurement."""
    from quire.util.files import written_anew

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with written_anew(place) as file:
            file.write(json.dumps(found).encode())
    except OSError:
        pass
