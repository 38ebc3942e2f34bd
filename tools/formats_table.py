"""Generates the tables of docs/formats.md: python -m tools.formats_table rewrites them, a test compares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.marked_tables import replaced

from quire.program.formats import WeightFormat
from quire.quant.ggml import PACKED, READ_TYPES, TYPES_BY_ID
from quire.spec.gguf_architectures import ARCHITECTURES
from quire.spec.quantization import METHODS
from quire.text.gguf_tokenizer import KINDS
from quire.text.pretokenizers import WORDS

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _packed(form: WeightFormat | None) -> str:
    if form is None or form.groups is None:
        return "unchanged"
    offsets = "" if form.groups.offsets == "none" else f", offsets {form.groups.offsets}"
    return f"{form.dtype}, groups of {form.groups.size}, scales {form.groups.scales}{offsets}"


def tables() -> dict[str, str]:
    """The tables, keyed by the name of their marker in the page."""
    types = (
        (kind.name, f"{8 * kind.nbytes / kind.values:g}", _packed(PACKED.get(name)))
        for name, kind in READ_TYPES.items()
    )
    others = ", ".join(kind.name for kind in TYPES_BY_ID.values() if kind.name not in READ_TYPES)
    return {
        "gguf-types": _table(("type", "bits per weight", "computed as"), types)
        + f"\n\nRecognised by name and size, but refused at load: {others}.",
        "gguf-architectures": _table(
            ("general.architecture", "read as model_type"),
            ((a, b.model_type) for a, b in ARCHITECTURES.items()),
        ),
        "gguf-tokenizers": f"Kinds (`tokenizer.ggml.model`): {', '.join(KINDS)}. Word expressions "
        f"(`tokenizer.ggml.pre`): {', '.join(sorted(WORDS))}.",
        "quantization-config": _table(
            ("quant_method", "supported"), ((name, text) for name, (_, text) in METHODS.items())
        ),
    }


def render(page: str) -> str:
    """Insert every table into the page."""
    for name, table in tables().items():
        page = replaced(page, name, f"{table}\n")
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
