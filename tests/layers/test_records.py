"""quire.records.dataclass does what dataclasses.dataclass does for frozen classes with slots."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from quire.records import dataclass as record


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


def test_another_kind_of_class_is_refused() -> None:
    with pytest.raises(TypeError, match="frozen"):
        record(frozen=False, slots=True)
