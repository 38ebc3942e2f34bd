"""How a template reads a message's content: as a string, as a list of parts, or as either."""

from __future__ import annotations

import enum

from jinja2 import nodes

_TYPE_TESTS = frozenset(("string", "mapping", "iterable", "sequence", "none"))


class ContentForm(enum.Enum):
    """What a template expects in message.content."""

    STRING = "string"  # prints it: text parts are joined first
    PARTS = "parts"  # loops over parts and never asks whether it is a string: strings are wrapped
    EITHER = "either"  # tests for the type itself: handed over as it came


def content_form(template: nodes.Template) -> ContentForm:
    """Read the form off the syntax tree: does anything loop over, or index, a message's content?"""
    names = _content_names(template)
    # Asking for the length or an index of content is left out: strings have both.
    loops = any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))
    if not loops:
        return ContentForm.STRING
    tested = any(
        test.name in _TYPE_TESTS and _is_content(test.node, names) for test in template.find_all(nodes.Test)
    )
    return ContentForm.EITHER if tested else ContentForm.PARTS


def _content_names(template: nodes.Template) -> set[str]:
    """Variables that hold a message's content: "content" itself (often a macro's argument) and what is set
    from it.
    """
    names = {"content"}
    assignments = [
        (assign.target.name, assign.node)
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name)
    ]
    grown = True
    while grown:
        grown = False
        for name, value in assignments:
            if name not in names and _is_content(value, names):
                names.add(name)
                grown = True
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):  # the meter wraps loops; |trim and the like keep the form
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
