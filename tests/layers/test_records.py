"""quire.records.dataclass does what dataclasses.dataclass does for classes with slots."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any, Generic, TypeVar

import pytest

from quire.records import dataclass as record

T = TypeVar("T")


def define(decorator: Any, **options: Any) -> type:
    @decorator(frozen=True, slots=True, **options)
    class Shape:
        """Documented."""

        name: str
        sizes: tuple[int, ...] = ()
        tags: dict[str, int] = field(default_factory=dict, compare=False)
        hidden: int = field(default=7, repr=False)
        made: int = field(init=False, default=3)
        late: float = field(default=0.5, kw_only=True)

        def __post_init__(self) -> None:
            if self.name == "bad":
                raise ValueError("name")

        @property
        def size(self) -> int:
            return sum(self.sizes)

    return Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    a: int
    b: str = "x"


@record(frozen=True, slots=True)
class Ours:
    a: int
    b: str = "x"


@pytest.mark.parametrize("options", [{}, {"kw_only": True}])
def test_same_behaviour(options: dict[str, Any]) -> None:
    ours, standard = define(record, **options), define(dataclasses.dataclass, **options)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"name": "a"}), (("a",), {}), (("a", (1, 2)), {"late": 1.0}), ((), {"name": "a", "tags": {"x": 1}}),
        ((), {}), (("a", 1, 2, 3, 4), {}), ((), {"name": "bad"}), ((), {"name": "a", "made": 1}),
    ]  # fmt: skip
    made = []
    for args, words in calls:
        found: list[Any] = []
        for cls in (ours, standard):
            try:
                found.append(cls(*args, **words))
            except (TypeError, ValueError) as error:
                found.append(type(error))
        if isinstance(found[0], type):
            assert found[0] is found[1]
            continue
        made.append(found)
        assert repr(found[0]) == repr(found[1])
        assert dataclasses.asdict(found[0]) == dataclasses.asdict(found[1])
        assert dataclasses.astuple(found[0]) == dataclasses.astuple(found[1])
        assert hash(found[0]) == hash(found[1])
        assert dataclasses.replace(found[0], late=2.0).late == 2.0
        assert copy.deepcopy(found[0]) == found[0]
        assert found[0].size == found[1].size
        assert not hasattr(found[0], "__dict__")
    assert [a[0] == b[0] for a in made for b in made] == [a[1] == b[1] for a in made for b in made]
    assert made[0][0] != made[0][1]
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(standard)]
    assert ours.__match_args__ == standard.__match_args__
    assert ours.__doc__ == standard.__doc__


def test_it_is_frozen_and_can_be_pickled() -> None:
    for value in (Ours(1), Standard(1)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
            value.a = 2  # type: ignore[misc]
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'a'"):
            del value.a
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.copy(value) == value


@pytest.mark.parametrize("decorator", [record, dataclasses.dataclass])
def test_values_that_can_change(decorator: Any) -> None:
    @decorator(slots=True)
    class Count:
        name: str
        seen: list[int] = field(default_factory=list)

    @decorator(slots=True, eq=False)
    class Identity(Generic[T]):
        value: int

    class Sub(Count):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__("sub")

    first, second = Count("a"), Count("a")
    first.seen.append(1)
    assert first != second
    second.seen = [1]
    assert first == second == copy.deepcopy(first) == dataclasses.replace(first)
    with pytest.raises(TypeError, match="unhashable"):
        hash(first)
    assert Sub().name == "sub"
    assert Identity(1) != Identity(1)
    assert len({Identity(1), Identity(1)}) == 2
    identity = Identity(1)
    with pytest.raises(AttributeError):
        identity.other = 2


@pytest.mark.parametrize("decorator", [record, dataclasses.dataclass])
def test_the_signature_is_known_before_a_value_is_made(decorator: Any) -> None:
    cls = define(decorator)
    parameters = list(inspect.signature(cls).parameters.values())
    assert [p.name for p in parameters] == ["name", "sizes", "tags", "hidden", "late"]
    assert [p.kind for p in parameters][-2:] == [
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    ]
    assert cls("a").name == "a"


def test_an_init_that_wraps_the_first_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cls: Any = define(record)
    inner, calls = cls.__init__, []

    def wrapped(self: Any, *args: Any) -> None:
        calls.append(args)
        inner(self, *args)

    monkeypatch.setattr(cls, "__init__", wrapped)
    assert [cls("a").name, cls("b").name] == ["a", "b"]
    assert calls == [("a",), ("b",)]


def test_another_kind_of_class_is_refused() -> None:
    with pytest.raises(TypeError, match="slots"):
        record(frozen=True, slots=False)
