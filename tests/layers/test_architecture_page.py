"""docs/architecture.md says what the code is: how many files an addition touches, and names that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
if not PAGE.exists():  # an installed package
    pytest.skip("the page is not here", allow_module_level=True)

# What every source file that an example touches mentions, and no other. The examples are those of the page.
TOUCHED = {
    "op": r"class Scale\(Op\)|@defines\(Scale\)|QUIRE_OP\(Scale\)|\bscale_rows\b|\bScale\([^f]",
    "output of a step": r"Output\(\"maxima\"|get\(\"maxima\"|\[\"maxima\"\]",
    "family of known parts": r"\bmixtral\b(?!-8x7b|\", \"MixtralFor)",  # a released shape only names it
    "engine option": r"\bnum_kv_blocks\b",
    "sampling parameter, a number": r"\bmin_p\b",
    "endpoint": r"\"/detokenize\"|\*tokens\.ROUTES",
    # The control room need not show it.
    "metric: a gauge of the engine": r"\bkv_waste_tokens\b.*(float|int|Gauge|\")|\.kv_waste_tokens(?!, since)",
}
NAMES = re.compile(r"`([^`]+)`")


@cache
def sources() -> dict[str, str]:
    """Text of the source files, by path."""
    folders = {"src/quire": (".py", ".pyi"), "csrc": (".cpp", ".h")}
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder, suffixes in folders.items()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes
    }


@cache
def words() -> set[str]:
    """Every word of the source files."""
    return {word for text in sources().values() for word in re.findall(r"\w+", text)}


def rows(after: str) -> Iterator[list[str]]:
    """Cells of the first table after a sentence of the page."""
    text = PAGE.read_text()
    assert after in text
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def paths(text: str) -> list[str]:
    """The files that a text names, from the root of the repository."""
    found = []
    for name in NAMES.findall(text):
        ends = tuple(f"/{name}{suffix}" for suffix in ("", ".py"))
        found += [path for path in sources() if f"/{path}".endswith(ends)]
    return found


def test_an_addition_touches_as_many_files_as_the_page_says() -> None:
    said = {
        what: (int(count), example) for what, count, example in rows("Source files touched by one addition")
    }
    assert said.keys() <= TOUCHED.keys(), "an addition of the page that this test does not count"
    assert len(said) >= 6
    for what, (count, example) in said.items():
        found = {path for path, text in sources().items() if re.search(TOUCHED[what], text)}
        assert len(found) == count, f"{what}: {sorted(found)}"
        assert set(paths(example)) <= found, f"{what}: the page names files that are not touched"


def exists(name: str) -> bool:
    """True for a file, a folder, what a file defines, an identifier or an endpoint of the code."""
    if name.startswith("/"):
        return any(f'"{name}"' in text for text in sources().values())
    if found := re.fullmatch(r"([\w/]+/\w+)\.(?!py$|cpp$|h$|md$|json$)(\w+)", name):
        return any(re.search(rf"\b{found[2]}\b", sources()[path]) for path in paths(f"`{found[1]}`"))
    places = [ROOT / base / name for base in ("", "src/quire", "src/quire/engine", "csrc", "docs")]
    if any(place.exists() for place in places) or paths(f"`{name}`"):
        return True
    last = re.split(r"[./: ]", re.split(r"[(\[]", name)[0])[-1]
    return "/" not in name and last in words()


@pytest.mark.parametrize(
    "part", re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:], ids=lambda p: p.split("\n")[0]
)
def test_what_the_page_names_exists(part: str) -> None:
    text = re.sub(r"```.*?```", "", part, flags=re.S)
    named = {name for name in NAMES.findall(text) if not re.match(r"python -m|quire |--|#", name)}
    assert not sorted(name for name in named if not exists(name))


def test_a_name_that_does_not_exist_is_noticed() -> None:
    for name in (
        "core/no_such_file",
        "NoSuchType",
        "worker/scheduler.py",
        "core/scheduler.no_such_thing",
        "/nothing",
    ):
        assert not exists(name)
    for name in ("core/scheduler.update", "SchedulerOutput", "csrc/kernels.h", "front/stream", "/detokenize"):
        assert exists(name)
