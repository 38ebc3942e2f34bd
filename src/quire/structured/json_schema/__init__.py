"""JSON schemas as grammars: enforced completely, or refused with the keyword and its path.

`compile_json_schema` writes one llguidance grammar, in Lark. Every schema becomes claims on values; claims are expanded
into branches of atoms, a type at a time (`claims`), negation and exclusive alternatives included; branches become
rules (`value_rules`), in which a property stands at most once, in the order of the schema. Rules that nothing finite
satisfies are left out, so no answer can come to a dead end.
"""

from __future__ import annotations

from quire.records import dataclass
from quire.structured.json_schema import logic_keywords, part_keywords, value_keywords
from quire.structured.json_schema.claims import Claims
from quire.structured.json_schema.refusal import SchemaError
from quire.structured.json_schema.schema_documents import SchemaDocument
from quire.structured.json_schema.value_rules import ValueRules

__all__ = ["HANDLERS", "CompiledSchema", "SchemaError", "compile_json_schema", "json_object_grammar"]

HANDLERS = {**value_keywords.HANDLERS, **logic_keywords.HANDLERS, **part_keywords.HANDLERS}
# Between two tokens of JSON: a space, or a line break and an indentation. A small model would go on with any other.
WHITESPACE = "[ ]|\\r?\\n([ ]{0,64}|\\t{0,16})"


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """A grammar of the answers that a schema allows, and the keywords that it does not enforce."""

    source: str
    dropped: tuple[str, ...] = ()


def compile_json_schema(schema: object, *, strict: bool = True, whitespace: bool = True) -> CompiledSchema:
    """Compile a schema: parsed JSON, of draft 4 to 2020-12 as its `$schema` says, else 2020-12.

    Raises SchemaError if a keyword cannot be enforced exactly, if no value is valid, or if the schema is malformed or
    exceeds a limit. Without `strict`, keywords that cannot be enforced are left out and listed in `dropped`.
    `whitespace` allows spaces and line breaks between tokens of JSON; without it, there are none.
    """
    document = SchemaDocument(schema)
    claims = Claims(document, HANDLERS, strict=strict)
    space = WHITESPACE if whitespace else None
    values = ValueRules(claims, space)
    try:
        start = values.value_of([claims.claim(document.root, ())])
        values.write()
    except RecursionError:
        raise SchemaError("", "", "schemas in schemas in schemas: too many apply to one value") from None
    header = "" if space is None else f'%llguidance {{"ignore_once": true}}\n%ignore /{space}/'
    source = values.rules.written(start, header)
    if source is None:
        raise SchemaError("", "", "no value is valid under the schema")
    return CompiledSchema(source, tuple(claims.dropped))


def json_object_grammar(*, whitespace: bool = True) -> str:
    """The grammar of any JSON object."""
    return compile_json_schema({"type": "object"}, whitespace=whitespace).source
