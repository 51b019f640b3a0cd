"""Tests of schemas of forced tool calls: the texts that the grammar of the whole schema allows."""

import json
import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from slotzero.formats.answer_grammar import AnswerRules, answer_grammar
from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.tool_formats import HERMES
from slotzero.formats.written_calls import WrittenCall, written_calls
from slotzero.grammars.matcher import CompiledGrammar, GrammarVocabulary, load_vocabulary
from slotzero.sampling.structured import StructuredOutputs
from slotzero.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
EOS = 257
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
DRAFTS = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2020-12/schema",
)


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return load_vocabulary(Tokenizer.bytes_tokenizer().to_json(), 259, (EOS,))


def compiled(vocabulary: GrammarVocabulary, schema: dict[str, Any]) -> CompiledGrammar:
    asked = StructuredOutputs(json_schema=schema)
    return CompiledGrammar(vocabulary, asked.kind, asked.text)


Tool = tuple[str, dict[str, Any]]


def tool(name: str, parameters: dict[str, Any]) -> Tool:
    return name, parameters


def record(of: Any, **more: Any) -> dict[str, Any]:
    """Return the schema of an object with one property, a."""
    closed = {"type": "object", "required": ["a"], "additionalProperties": False}
    return closed | {"properties": {"a": of}} | more


def allows(vocabulary: GrammarVocabulary, schema: dict[str, Any], value: Any) -> bool:
    return matches(compiled(vocabulary, schema), json.dumps(value))


def matches(grammar: CompiledGrammar, text: str) -> bool:
    mask = grammar.first_mask
    for byte in text.encode():
        if not mask[byte // 8] >> byte % 8 & 1:
            return False
        mask = grammar.follow(1, [byte])
    return bool(mask[EOS // 8] >> EOS % 8 & 1)


def calls(
    vocabulary: GrammarVocabulary, tools: list[Tool], name: str, *arguments: Any
) -> list[bool]:
    form = AnswerFormat(calls=HERMES, tools=dict(tools))
    pieces = Tokenizer.bytes_tokenizer().special_pieces
    text = answer_grammar(form, AnswerRules(dict(tools), is_forced=True), pieces)
    written = [written_calls(HERMES, [WrittenCall(name, value)]) for value in arguments]
    return [matches(CompiledGrammar(vocabulary, "grammar", text), one) for one in written]


class Street(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    number: Annotated[int, Field(ge=1)]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: Street
    others: list[Street]
    kind: Literal["a", "b"]


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    value: int
    children: list["Tree"]


HOME = {"name": "Elm", "number": 3}


@pytest.mark.parametrize("num_tools", [1, 2])
def test_nested_models_of_pydantic(vocabulary: GrammarVocabulary, num_tools: int) -> None:
    tools = [tool("save", Person.model_json_schema()), tool("grow", Tree.model_json_schema())]
    good = {"street": HOME, "others": [HOME], "kind": "b"}
    bad = good | {"others": [HOME | {"number": "3"}]}
    assert calls(vocabulary, tools[:num_tools], "save", good, bad) == [True, False]
    leaf = {"value": 1, "children": []}
    tree, wrong = leaf | {"children": [leaf]}, leaf | {"children": [{"value": 1}]}
    assert calls(vocabulary, tools[-num_tools:], "grow", tree, wrong) == [True, False]


def test_a_structure_may_have_definitions_too(vocabulary: GrammarVocabulary) -> None:
    schema = Person.model_json_schema()
    assert allows(vocabulary, schema, {"street": HOME, "others": [], "kind": "a"})
    assert not allows(vocabulary, schema, {"street": HOME, "others": [], "kind": "c"})


REFERENCES: dict[str, dict[str, Any]] = {
    "$defs": record({"$ref": "#/$defs/A"}, **{"$defs": {"A": INTEGER}}),
    "definitions": record({"$ref": "#/definitions/A"}, definitions={"A": INTEGER}),
    "root": {"$ref": "#/$defs/R", "$defs": {"R": record({"$ref": "#/$defs/A"}), "A": INTEGER}},
    "nested": record({"$ref": "#/$defs/B/$defs/A"}, **{"$defs": {"B": {"$defs": {"A": INTEGER}}}}),
    "chain": record({"$ref": "#/$defs/B"}, **{"$defs": {"A": INTEGER, "B": {"$ref": "#/$defs/A"}}}),
    "escaped": record({"$ref": "#/$defs/a~1b%20~0c"}, **{"$defs": {"a/b ~c": INTEGER}}),
    "elsewhere": record({"$ref": "#/components/schemas/A"}, components={"schemas": {"A": INTEGER}}),
    "anchor": record({"$ref": "#it"}, **{"$defs": {"A": INTEGER | {"$anchor": "it"}}}),
    "absolute": record(
        {"$ref": "https://example.com/s#/$defs/A"},
        **{"$id": "https://example.com/s", "$defs": {"A": INTEGER}},
    ),
    "relative": record({"$ref": "A"}, **{"$defs": {"A": INTEGER | {"$id": "A"}}}),
}


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_references_of_every_kind(
    vocabulary: GrammarVocabulary, kind: str, draft: str | None
) -> None:
    given = REFERENCES[kind] | ({} if draft is None else {"$schema": draft})
    for tools in ([tool("f", given)], [tool("g", record(STRING)), tool("f", given)]):
        assert calls(vocabulary, tools, "f", {"a": 1}, {"a": "x"}) == [True, False]


def test_a_reference_to_the_whole_schema(vocabulary: GrammarVocabulary) -> None:
    closed = {"type": "object", "additionalProperties": False}
    tools = [tool(name, closed | {"properties": {name: {"$ref": "#"}}}) for name in "fg"]
    assert calls(vocabulary, tools, "f", {"f": {"f": {}}}, {"g": {}}) == [True, False]
    assert calls(vocabulary, tools, "g", {"g": {"g": {}}}, {"f": {}}) == [True, False]


@pytest.mark.parametrize("kind", ["$defs", "definitions", "nested", "relative"])
def test_definitions_of_the_same_name_are_kept_separate(
    vocabulary: GrammarVocabulary, kind: str
) -> None:
    given = REFERENCES[kind]
    other = json.loads(json.dumps(given).replace('"integer"', '"string"'))
    tools = [tool("f", given), tool("g", other)]
    assert calls(vocabulary, tools, "f", {"a": 1}, {"a": "x"}) == [True, False]
    assert calls(vocabulary, tools, "g", {"a": 1}, {"a": "x"}) == [False, True]


def test_data_that_looks_like_a_reference(vocabulary: GrammarVocabulary) -> None:
    data = {"$ref": "#/nowhere", "$id": "x"}
    for of in ({"const": data}, {"enum": [data]}):
        given = record(of | {"default": data, "examples": [data]})
        assert calls(vocabulary, [tool("f", given)], "f", {"a": data}, {"a": 1}) == [True, False]
    named = {"type": "object", "properties": {"$ref": STRING, "$id": STRING}, "required": ["$ref"]}
    assert calls(vocabulary, [tool("f", named)], "f", {"$ref": "x", "$id": "y"}, {}) == [
        True,
        False,
    ]


@pytest.mark.parametrize("there", ["#/$defs/B", "#/nowhere", "#odd", "https://example.com/schema"])
def test_a_reference_to_nothing_is_named(vocabulary: GrammarVocabulary, there: str) -> None:
    given = record({"$ref": there}, **{"$defs": {"A": INTEGER}})
    with pytest.raises(ValueError, match=re.escape(there.partition("#")[2] or there)):
        compiled(vocabulary, given)
    with pytest.raises(ValueError, match=re.escape(there.partition("#")[2] or there)):
        calls(vocabulary, [tool("f", given)], "f", {})
