"""dataclasses.dataclass for classes that have slots, defined in a third of the time.

The standard library compiles seven methods for each class. A command imports more than a hundred such classes, which
took most of the time of its imports. Here only `__init__` is compiled, when the first value of a class is made; the
other methods are the same for all classes and read the fields when they are called. All functions of `dataclasses` and
`inspect.signature` work with such a class.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]
_MISSING = dataclasses.MISSING

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        *,
        slots: bool,
        frozen: bool = False,
        kw_only: bool = False,
        eq: bool = True,
        repr: bool = True,  # noqa: A002
    ) -> Callable[[type], type]:
        """`dataclasses.dataclass` for classes without a base that has fields."""
        if not slots:
            raise TypeError("quire.records.dataclass is for classes with slots")
        return lambda cls: _define(cls, frozen, kw_only, eq, repr)


def _define(cls: type, frozen: bool, kw_only: bool, eq: bool, shown: bool) -> type:
    if cls.__doc__ is None:
        cls.__doc__ = ""  # otherwise the standard library builds a signature for it, which is slow
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=True, kw_only=kw_only)
    made.__dataclass_params__.frozen, made.__dataclass_params__.eq = frozen, eq
    fields = dataclasses.fields(made)
    methods: dict[str, Any] = {"__init__": _first_init(made, fields, frozen), "__signature__": _Signature()}
    if shown:
        methods["__repr__"] = _repr
    if eq:
        methods |= _comparing(tuple(field.name for field in fields if field.compare), frozen)
    if frozen:
        methods |= _FROZEN
    for name, method in methods.items():
        if name not in cls.__dict__:
            setattr(made, name, method)
    return made  # type: ignore[no-any-return]


class _Signature:
    """The signature of the class's `__init__`, looked up when something asks for it."""

    def __get__(self, _value: object, cls: type) -> inspect.Signature:
        init: Any = cls.__init__  # type: ignore[misc]
        signature = inspect.signature(getattr(init, "compile", lambda: init)())
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _first_init(cls: Any, fields: tuple[dataclasses.Field[Any], ...], frozen: bool) -> Callable[..., None]:
    """An `__init__` that puts the compiled one into its place when it is called."""

    compiled: Callable[..., None] | None = None

    def compile_init() -> Callable[..., None]:
        nonlocal compiled
        compiled = compiled or _init(cls, fields, frozen)
        if cls.__init__ is first:
            cls.__init__ = compiled
        return compiled

    def first(self: Any, *args: Any, **words: Any) -> None:
        compile_init()(self, *args, **words)

    first.compile = compile_init  # type: ignore[attr-defined]
    return first


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...], frozen: bool) -> Callable[..., None]:
    """The only compiled method, because it is called often."""
    values: dict[str, Any] = {"_set": object.__setattr__}
    positional: list[str] = []
    keywords: list[str] = []
    body: list[str] = []
    for field in fields:
        default = ""
        value = field.name
        if field.default is not _MISSING:
            values[f"_d_{field.name}"] = field.default
            default = f"=_d_{field.name}"
        elif field.default_factory is not _MISSING:
            values[f"_f_{field.name}"], values["_none"] = field.default_factory, _MISSING
            default, value = "=_none", f"_f_{field.name}() if {field.name} is _none else {field.name}"
            if not field.init:
                value = f"_f_{field.name}()"
        if field.init:
            (keywords if field.kw_only else positional).append(field.name + default)
        elif not default:
            continue
        elif field.default is not _MISSING:
            value = f"_d_{field.name}"
        body.append(f"_set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(body or ["pass"]), values)
    made: Callable[..., None] = values["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return made


def _comparing(names: tuple[str, ...], hashed: bool) -> dict[str, Any]:
    """Equality and hash of the compared fields; values that can change have no hash."""
    if len(names) > 1:
        get: Callable[[Any], Any] = attrgetter(*names)
    else:  # attrgetter gives a tuple for several names only

        def get(self: Any) -> Any:
            return tuple(getattr(self, name) for name in names)

    def eq(self: Any, other: object) -> bool:
        return bool(get(self) == get(other)) if other.__class__ is self.__class__ else NotImplemented

    return {"__eq__": eq, "__hash__": (lambda self: hash(get(self))) if hashed else None}


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse_set(_self: Any, name: str, _value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(_self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_FROZEN = {
    "__setattr__": _refuse_set,
    "__delattr__": _refuse_delete,
    "__getstate__": _state,
    "__setstate__": _set_state,
}
