"""Arguments written as literals of Python, or as JSON, to JSON."""

from __future__ import annotations

import json
import math
from typing import Any

_CONSTANTS = {"true": True, "false": False, "null": None}


def json_of_literal(text: str) -> str:
    """The JSON of a literal. Raises ValueError for anything else."""
    try:
        return json.dumps(_value(text), ensure_ascii=False, allow_nan=False)
    except (RecursionError, MemoryError, SyntaxError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _value(text: str) -> Any:
    try:
        return json.loads(text)  # its escapes differ from Python's
    except ValueError:
        import ast  # only for models that write Python

        try:
            return _node(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError:  # templates write line breaks into strings as they are
            return _node(ast.parse(text.strip().replace("\n", "\\n"), mode="eval").body)


def _node(node: Any) -> Any:
    import ast

    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float)):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("not a number of JSON")
        if isinstance(node.value, str):  # a pair of surrogates in JSON's spelling is one character
            return node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        return node.value
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        value = _node(node.operand)
        if type(value) in (int, float):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_node(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key is not None and _node(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_node, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    raise ValueError("not a literal")
