"""A Jinja environment for untrusted chat templates.

It renders like transformers, and meters every loop item, call, filter, test, operator and output, so that a template
can neither reach Python's internals nor run, or grow, without bound. All of it happens in the calling thread, without a
watchdog to race with. Text that the template writes itself is distinguished from its inputs (text.provenance).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_replace, sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, markup_join
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text import guards
from quire.text.meter import MAX_INT_BITS, LimitExceededError, Meter
from quire.text.provenance import TemplateText, concat, followed, indent

# Never used by chat templates, and either random, unbounded, or HTML.
_DROPPED_FILTERS = ("forceescape", "pprint", "random", "urlencode", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = frozenset(("encode", "maketrans", "translate", "to_bytes", "from_bytes"))
_MAX_TIME_FORMAT = 256
_MACRO_UNITS = 10  # a macro call costs several microseconds

# Names that no template can spell: filters of the meter, inserted into the syntax tree.
_EACH, _DEEP, _CONCAT, _SIZED, _ADD = "meter each", "meter deep", "meter concat", "meter sized", "meter add"
_TEXTS = frozenset((str, TemplateText))


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception: it does not accept these messages."""


class _OwnTexts(CodeGenerator):
    """Compiles a template so that its own texts come from `own_texts` of the environment."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.value, TemplateText):
            self.write(self._kept(node.value))
        else:
            super().visit_Const(node, frame)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._kept(TemplateText("".join(group)))

    def _kept(self, text: TemplateText) -> str:
        texts = self.environment.own_texts  # type: ignore[attr-defined]
        texts.append(text)
        return f"environment.own_texts[{len(texts) - 1}]"


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template. `now` is the clock behind strftime_now.

    A rendering runs inside `metered(meter)`, which applies to the calling thread only.
    """

    code_generator_class = _OwnTexts
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run operations while compiling, outside the meter
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
        )
        self.own_texts: list[TemplateText] = []
        self._thread = threading.local()
        self.concat = self._concat  # type: ignore[method-assign]
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(tojson=_tojson, join=_join, replace=_replace, indent=_indent)
        for name, function in self.filters.items():
            self.filters[name] = self._metered_filter(name, function)
        for name, function in self.tests.items():
            self.tests[name] = self._metered_test(function)
        self.filters.update(
            {
                _EACH: self._each,
                _DEEP: self._deep,
                _CONCAT: self._join_outputs,
                _SIZED: self._sized,
                _ADD: self._add,
            }
        )
        self.globals.clear()
        self.globals.update(
            range=_bounded_range,
            dict=_TemplateDict(),
            namespace=_TemplateNamespace,
            cycler=jinja2.utils.Cycler,
            joiner=jinja2.utils.Joiner,
            raise_exception=_raise_exception,
            strftime_now=_clock(now),
        )

    # -- the meter ---------------------------------------------------------------------------------

    @contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        """Charge a rendering of this thread to `meter`."""
        self._thread.meter = meter
        try:
            yield
        finally:
            del self._thread.meter

    @property
    def _meter(self) -> Meter:
        meter: Meter = self._thread.meter
        return meter

    # -- compiling ---------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _MeterInserter().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    # -- calls of the compiled template ------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002
        return guards.binary(self._meter, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = self._meter
        meter.spend(_MACRO_UNITS if isinstance(obj, Macro) else 1)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = guards.string_method(meter, owner, obj.__name__, args, kwargs)
            if obj.__name__ in ("join", "replace"):
                obj = getattr(followed(owner), obj.__name__)
        elif isinstance(owner, list | tuple | dict):
            meter.deep(owner) if args else meter.items(len(owner))
        if isinstance(obj, Macro):
            # The varargs are a tuple: see visit_Tuple.
            meter.deep([arg for arg in args if isinstance(arg, tuple)])
        else:
            meter.deep(args)
            meter.deep(kwargs)
        if isinstance(obj, LoopContext):  # a recursive loop: its items never pass a For node
            args = tuple(meter.each(arg) if isinstance(arg, Iterable) else arg for arg in args)
        result = super().call(context, obj, *args, **kwargs)
        meter.result(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once: jinja2's sandbox prints an unsafe attribute as an empty string."""
        raise jinja2.exceptions.SecurityError(
            f"access to {attribute!r} of {type(obj).__name__!r} is not allowed"
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__name__", None)
        if not isinstance(owner, str) or name not in ("format", "format_map"):
            return None

        def format_text(*args: Any, **kwargs: Any) -> str:
            formatter = guards.MeteredFormatter(self._meter, self._field)
            return formatter.format_text(owner, *(((), args[0]) if name == "format_map" else (args, kwargs)))

        return format_text

    def _field(self, value: Any, name: str, is_attribute: bool) -> Any:
        return self.getattr(value, name) if is_attribute else self.getitem(value, name)

    @jinja2.pass_context
    def _finalize(self, context: Context, value: Any) -> Any:  # noqa: ARG002
        if not isinstance(value, str):
            self._meter.deep(value)
        else:
            self._meter.text(len(value))
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        parts = parts if isinstance(parts, list) else list(parts)
        self._meter.text(sum(map(len, parts)))
        return concat(parts)

    # -- calls inserted into the syntax tree --------------------------------------------------------

    def _each(self, items: Any) -> Any:
        return _MeteredItems(self._meter, items)

    def _deep(self, value: Any) -> Any:
        self._meter.deep(value)
        return value

    def _sized(self, value: Any) -> Any:
        self._meter.result(value)
        return value

    @jinja2.pass_eval_context
    def _join_outputs(self, context: nodes.EvalContext, parts: list[Any]) -> str:
        meter = self._meter
        meter.text(sum(len(part) if isinstance(part, str) else meter.deep(part) for part in parts))
        return markup_join(parts) if context.autoescape else concat([str(part) for part in parts])

    def _add(self, parts: list[Any]) -> Any:
        if set(map(type, parts)) <= _TEXTS:
            return self._concat(parts)
        total = parts[0]
        for part in parts[1:]:
            total = guards.binary(self._meter, "+", total, part)
        return total

    # -- filters and tests -------------------------------------------------------------------------

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        guard = guards.FILTERS.get(name)
        constant = name in guards.CONSTANT_FILTERS
        shallow = name in guards.SHALLOW_FILTERS
        consuming = name in guards.CONSUMING_FILTERS
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # copies the mark that makes jinja2 pass the context first
        def run(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter
            head, rest = args[:skip], list(args[skip:])
            if consuming and rest and isinstance(rest[0], Iterator):
                rest[0] = list(meter.each(rest[0]))
            if guard is not None:
                guard(meter, *rest, **kwargs)
            elif constant:
                meter.spend()
            elif shallow:
                meter.result(rest[0] if rest else None)
            else:
                for value in (*rest, *kwargs.values()):
                    meter.deep(value)
            result = function(*head, *rest, **kwargs)
            if isinstance(result, GeneratorType):
                # Run it now: generators nested by a loop would run, and be freed, by deep recursion.
                result = iter(list(meter.each(result)))
            if not constant:
                meter.result(result)
            return result

        return run

    def _metered_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter
            meter.spend()
            if len(args) > 1:
                for value in args:
                    if isinstance(value, str | list | tuple | dict):
                        meter.deep(value)
            return function(*args, **kwargs)

        return run


class _MeterInserter(NodeTransformer):
    """Inserts the meter's filters into a template's syntax tree where jinja2 has no hook, and marks its texts."""

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        kind = type(node).__name__.lower()
        raise jinja2.TemplateAssertionError(f"a chat template must not {kind} another one", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse  # noqa: N815

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _EACH)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        holders: list[Any] = [node, *node.ops]
        for holder in holders:
            if not _unmark(holder.expr):
                holder.expr = _filtered(holder.expr, _DEEP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        """Handle a chain of + in one step: templates mostly concatenate texts."""
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        return _filtered(self.generic_visit(nodes.List([left, *parts[::-1]], lineno=node.lineno)), _ADD)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """Account for tuples: hashing and comparing visit all elements, and nesting one twice doubles the cost."""
        self.generic_visit(node)
        return _filtered(node, _DEEP) if node.ctx == "load" else node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, int) and node.value.bit_length() > MAX_INT_BITS:
            raise jinja2.TemplateAssertionError("an integer has too many digits", node.lineno)
        if isinstance(node.value, str):
            node.value = TemplateText(node.value)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        _unmark(node.arg)
        return _filtered(node, _SIZED) if isinstance(node.arg, nodes.Slice) else node


def _unmark(node: nodes.Node) -> bool:
    """Whether it is a constant. A text that is only looked up or compared is faster as a plain `str`."""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = str.__str__(node.value)
    return isinstance(node, nodes.Const)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _MeteredItems:
    """The items of a loop, one unit each; has a length only if the original has one."""

    __slots__ = ("_items", "_meter")

    def __init__(self, meter: Meter, items: Any) -> None:
        self._meter = meter
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._meter.each(self._items)

    def __len__(self) -> int:
        return len(self._items)


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %}, which marks the assistant's text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _TemplateDict:
    """`dict` for templates: makes dictionaries and has no other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` for templates; names with a leading underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # the inherited one prints every value


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute may not be called {name!r}")


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    # len() itself fails on a range longer than a machine word
    if (numbers.stop - numbers.start) // numbers.step > MAX_RANGE:
        raise LimitExceededError(f"it made a range of more than {MAX_RANGE} numbers")
    return numbers


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _clock(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002 - the name templates may pass
        if len(format) > _MAX_TIME_FORMAT:
            raise LimitExceededError(f"it used a time format of more than {_MAX_TIME_FORMAT} characters")
        return now().strftime(format)

    return strftime_now


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in training data: jinja2's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    """jinja2's filter, with a separator that tracks the template's text."""
    return sync_do_join(context, value, followed(str(d)), attribute)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """jinja2's filter, in a text that tracks the template's characters."""
    if not hasattr(value, "__html__"):
        value = followed(str(value))
    return do_replace(context, value, old, new, count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter, for a text that tracks the template's characters."""
    return (do_indent if hasattr(text, "__html__") else indent)(text, width, first, blank)
