"""A chapter of the lesson on a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quire.cli.markdown_text import MarkdownText, indented
from quire.util.markdown import MarkdownNode

if TYPE_CHECKING:
    from quire.learn.chapters import Chapter


def chapter_text(one: Chapter, text: MarkdownText) -> str:
    """The whole chapter: its text, what to run for simulations and listings, exercises with answers, sources."""
    title = one.title if one.number is None else f"{one.number}. {one.title}"
    parts = [
        text.lines([{"kind": "heading", "inline": [{"kind": "text", "text": title}]}]),
        [*text.wrapped(one.about)],
    ]
    for node in one.page():
        show = _SHOWN.get(node["kind"])
        parts.append([*(show(node, text) if show else text.block(node))])
    if one.number is not None:
        parts.append([f"Quiz: quire learn quiz {one.number}"])
    if one.given:
        parts.append(["Taken as given", *(f"- {number}: {source}" for number, source in one.given.items())])
    return "\n\n".join("\n".join(part) for part in parts)


def _simulation(node: MarkdownNode, _: MarkdownText) -> Iterator[str]:
    options = "".join(
        f" --{name.replace('_', '-')} {shlex.quote(value)}" for name, value in node["values"].items()
    )
    yield f"Simulation: quire learn {node['name']}{options}"


def _listing(node: MarkdownNode, _: MarkdownText) -> Iterator[str]:
    yield f"Listing: quire learn run {node['name']}"


def _see(node: MarkdownNode, _: MarkdownText) -> Iterator[str]:
    yield f"See it in the engine: GET /learn/api/see/{node['name']} of a running server, or /learn in a browser"


def _worked(node: MarkdownNode, text: MarkdownText) -> Iterator[str]:
    rows = [(row["place"], row["printed"], row["right"]["text"], row["note"]) for row in node["figures"]]
    yield from text.table(("figure", "printed", "computed", ""), rows)


def _exercise(node: MarkdownNode, text: MarkdownText) -> Iterator[str]:
    yield f"Exercise ({node['level']})"
    yield from indented([*text.lines(node["blocks"]), "", "Answer:", *text.lines(node["answer"])])


def _question(node: MarkdownNode, text: MarkdownText) -> Iterator[str]:
    yield from text.wrapped(text.inline(node["inline"]))
    yield from indented([*text.lines(node["answer"]), f"Shown by: {node['run']}"])


def _note(node: MarkdownNode, text: MarkdownText) -> Iterator[str]:
    yield from indented(text.lines(node["blocks"]))


def _rubric(node: MarkdownNode, text: MarkdownText) -> Iterator[str]:
    yield "After this chapter you can"
    yield from text.lines(node["blocks"])


_SHOWN: dict[str, Callable[[MarkdownNode, MarkdownText], Iterator[str]]] = {
    "simulation": _simulation, "listing": _listing, "see": _see, "worked": _worked, "exercise": _exercise,
    "question": _question, "note": _note, "rubric": _rubric,
}  # fmt: skip
