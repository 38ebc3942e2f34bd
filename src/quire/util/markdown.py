"""A part of Markdown as plain values: headings, paragraphs, flat lists, tables, fences; emphasis, code, links.

Whoever shows the values decides how: a page makes elements of them, a terminal lines. Nothing in them is HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

MarkdownNode = dict[str, Any]  # "kind", and what that kind has: "text", "inline", "items", "head", "rows", …

_INLINE = re.compile(
    r"(?P<fence>`+)(?P<code>.+?)(?P=fence)(?!`)|\{\{(?P<reference>[^{}]+)\}\}|\*\*(?P<strong>.+?)\*\*"
    r"|(?<!\w)\*(?P<emphasis>[^*\s](?:[^*]*[^*\s])?)\*(?!\w)|\[(?P<link>[^\[\]]+)\]\((?P<href>[^()\s]+)\)",
    re.DOTALL,
)
_ITEM = re.compile(r"(?P<mark>[-*+]|\d+[.)])\s+(?P<text>.*)")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
_DIVIDER = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
Resolve = Callable[[str], MarkdownNode]


def inline(text: str, resolve: Resolve | None = None) -> list[MarkdownNode]:
    """The parts of a line. `resolve` makes a node of what is between {{ and }}; without it that is text."""
    found: list[MarkdownNode] = []
    at = 0
    for match in _INLINE.finditer(text):
        if match["reference"] is not None and resolve is None:
            continue
        if match.start() > at:
            found.append({"kind": "text", "text": text[at : match.start()]})
        found.append(_inline_node(match, resolve))
        at = match.end()
    if at < len(text):
        found.append({"kind": "text", "text": text[at:]})
    return found


def _inline_node(match: re.Match[str], resolve: Resolve | None) -> MarkdownNode:
    if match["code"] is not None:
        return {"kind": "code", "text": match["code"].strip() or match["code"]}
    if resolve is not None and match["reference"] is not None:
        return resolve(match["reference"].strip())
    if match["link"] is not None:
        return {"kind": "link", "href": match["href"], "inline": inline(match["link"], resolve)}
    kind = "strong" if match["strong"] is not None else "emphasis"
    return {"kind": kind, "inline": inline(match[kind], resolve)}


def plain(nodes: list[MarkdownNode]) -> str:
    """The text of inline nodes, without marks."""
    return "".join(plain(node["inline"]) if "inline" in node else node["text"] for node in nodes)


def blocks(text: str, resolve: Resolve | None = None) -> list[MarkdownNode]:
    """The blocks of a text, in order."""
    return list(_blocks(text.splitlines(), resolve))


def _blocks(lines: list[str], resolve: Resolve | None) -> Iterator[MarkdownNode]:
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        if not line:
            at += 1
        elif line.startswith("```"):
            end = next(
                (i for i in range(at + 1, len(lines)) if lines[i].strip().startswith("```")), len(lines)
            )
            yield {
                "kind": "fence",
                "language": line.strip("`").strip(),
                "text": "\n".join(lines[at + 1 : end]),
            }
            at = end + 1
        elif heading := _HEADING.match(line):
            yield {"kind": "heading", "level": len(heading[1]), "inline": inline(heading[2], resolve)}
            at += 1
        elif "|" in line and at + 1 < len(lines) and _is_divider(lines[at + 1]):
            end = next((i for i in range(at + 2, len(lines)) if "|" not in lines[i]), len(lines))
            head, rows = _cells(line, resolve), [_cells(row, resolve) for row in lines[at + 2 : end]]
            width = len(head)
            yield {"kind": "table", "head": head, "rows": [(row + [[]] * width)[:width] for row in rows]}
            at = end
        elif _ITEM.match(line):
            end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
            yield _list(lines[at:end], resolve)
            at = end
        else:
            end = next((i for i in range(at + 1, len(lines)) if _begins(lines, i)), len(lines))
            text = " ".join(one.strip() for one in lines[at:end])
            yield {"kind": "paragraph", "inline": inline(text, resolve)}
            at = end


def _begins(lines: list[str], at: int) -> bool:
    """Whether a paragraph ends before this line."""
    line = lines[at].strip()
    if not line or line.startswith("```") or _HEADING.match(line) or _ITEM.match(line):
        return True
    return "|" in line and at + 1 < len(lines) and _is_divider(lines[at + 1])


def _is_divider(line: str) -> bool:
    return "-" in line and "|" in line and bool(_DIVIDER.match(line.strip()))


def _cells(line: str, resolve: Resolve | None) -> list[list[MarkdownNode]]:
    """The cells of a row. A bar between {{ and }} or in code divides no cells."""
    parts = re.split(r"\|(?![^{}]*\}\})(?=(?:[^`]*`[^`]*`)*[^`]*$)", line.strip().strip("|"))
    return [inline(part.strip(), resolve) for part in parts]


def _list(lines: list[str], resolve: Resolve | None) -> MarkdownNode:
    """A flat list: a line that begins without a mark goes on with the item above it."""
    items: list[str] = []
    for line in lines:
        if match := _ITEM.match(line.strip()):
            items.append(match["text"])
        else:
            items[-1] += f" {line.strip()}"
    ordered = lines[0].strip()[0].isdigit()
    return {"kind": "list", "ordered": ordered, "items": [inline(item, resolve) for item in items]}
