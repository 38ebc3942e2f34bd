"""Small talk and facts: every line of the data makes text, and refusals stay short of what is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.default_model.corpus import faq, followups, scope, smalltalk, tables, tasks, world
from tools.default_model.corpus.draw import Draw, Split
from tools.default_model.corpus.lists import categories

NAMES = [name for name, _ in world.TABLES] + ["jokes", "riddles", "curious", "proverbs", "twisters"]


@pytest.mark.parametrize("name", NAMES)
def test_every_relation_of_every_row_makes_a_question_and_an_answer(name: str) -> None:
    draw = Draw(name, Split.TRAIN)
    for relation in tables.relations(name):
        assert relation.rows
        for row in relation.rows:
            fact = tables.fact(draw, relation, row)
            assert "{" not in fact.asked + fact.said
            assert "  " not in fact.asked + fact.said
            assert all(any(o.lower() in fact.said.lower() for o in m.split("|")) for m in fact.must)


def test_every_slot_of_a_refusal_has_a_pool() -> None:
    draw = Draw("slots", Split.TRAIN)
    for entry in faq.load("scope"):
        for pattern in entry.asks:
            assert all(scope.filling(draw, slot) for slot in faq.SLOT.findall(pattern)), pattern


def test_what_is_refused_is_not_known() -> None:
    pools = tables.pools("pools")
    known = {row["country"].lower() for row in tables.rows("capitals")}
    assert not known & {land.lower() for land in pools["land"]}
    people = {row[c].lower() for row in tables.rows("people") for c in ("name", "short")}
    assert not people & {person.lower() for person in pools["person"]}
    terms = {row["it"].split()[-1] for row in tables.rows("definitions")}
    terms |= {row["animal"] for row in tables.rows("animals")}
    assert not terms & set(pools["noun"])
    assert not terms & set(pools["rare"])
    told = {row[0] for row in tasks.pairs("things", "things")} | {m for c in categories() for m in c.members}
    assert not told & set(pools["noun"])
    for heading, pool in (("recipes", "dish"), ("howto", "verbthing")):
        names = {name for row in tasks.pairs("everyday", heading) for name in row[0].split("|")}
        assert not names & {form for item in pools[pool] for form in (item, f"a {item}")}
    makers = {row["work"].lower() for row in tables.rows("works")}
    assert not makers & {w.lower() for kind in ("invention", "book", "film") for w in pools[kind]}


def test_a_table_with_a_cell_too_few_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.txt").write_text("a | b\n1 | 2\n3\n")
    monkeypatch.setattr(tables, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"bad\.txt:3"):
        tables.rows("bad")


@pytest.mark.parametrize("make", [smalltalk.make, scope.make, world.make, followups.make])
def test_turns_alternate_and_say_something(make: object) -> None:
    assert callable(make)
    for i in range(150):
        turns = make(Draw(f"t{i}", Split.TRAIN)).turns
        roles = [t.role for t in turns if t.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(t.content.strip() for t in turns)


def test_documents_are_plain_text() -> None:
    for i in range(100):
        text = world.document(Draw(f"d{i}", Split.TRAIN))
        assert text.strip()
        assert "{" not in text
