"""What llguidance would take otherwise than a JSON schema means it holds, or is refused by name."""

import datetime
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import InvalidSampling, SamplingParams
from engine.structured.grammars import Grammars

END = frozenset({256})
ODD = 2**53 + 1
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
SELF = {"$ref": "#"}
ANOTHER = "must hold another one, without end"


@pytest.fixture(scope="module")
def forms() -> Iterator[Grammars]:
    """A vocabulary of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({char: place for place, char in enumerate([*alphabet, "<end>"])}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    grammars = Grammars(made, made.get_vocab_size(), END)
    yield grammars
    grammars.close()


def accepts(forms: Grammars, schema: Any, text: str) -> bool:
    (matcher,) = forms.matchers(SamplingParams(structured_outputs={"json": schema}), END)
    assert matcher is not None
    return matcher.accepts(text)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": ODD},
        {"enum": [1, -ODD]},
        {"const": {"id": [ODD]}},
        {"const": 2**63},
        {"items": {"const": 2**64 - 1}},
    ],
    ids=str,
)
def test_an_integer_that_would_be_rounded_is_refused(forms: Grammars, schema: Any) -> None:
    with pytest.raises(InvalidSampling, match=r"whose integer -?\d+ would be rounded"):
        accepts(forms, schema, "")


@pytest.mark.parametrize("exact", [2**53, 2**53 + 2, 2**62, -(2**53)])
def test_an_integer_that_is_exact_is_written_with_its_digits(forms: Grammars, exact: int) -> None:
    assert [accepts(forms, {"const": exact}, str(exact + step)) for step in (-1, 0, 1)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_no_number_passes_a_bound(forms: Grammars, key: str, kind: str) -> None:
    """However large it is; a bound that leaves nothing is refused."""
    draw = random.Random(3)
    for bound in (
        ODD,
        -ODD,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        10**30,
        *(draw.randrange(2**54, 2**63) for _ in range(4)),
    ):
        schema = {"type": kind, key: bound}
        for value in (bound + step for step in range(-3, 4)):
            try:
                is_accepted = accepts(forms, schema, str(value))
            except InvalidSampling:
                continue
            assert not is_accepted or jsonschema.Draft202012Validator(schema).is_valid(value), (
                schema,
                value,
            )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bound_is_exclusive_where_floats_have_gaps(forms: Grammars, sign: int) -> None:
    """llguidance would add 1 to a float of 2**53, which changes nothing."""
    low, high = sorted((sign * 2**53, sign * (2**53 + 4)))
    schema = {
        "type": "integer",
        "exclusiveMinimum": low,
        "exclusiveMaximum": high,
        "minimum": low - 7,
    }
    accepted = [value for value in range(low - 2, high + 3) if accepts(forms, schema, str(value))]
    assert accepted == [sign * (2**53 + 2)]


def test_a_bound_is_kept_beside_a_large_one(forms: Grammars) -> None:
    schema = {"type": "integer", "minimum": 5, "exclusiveMinimum": -ODD}
    assert [accepts(forms, schema, text) for text in ("4", "5")] == [False, True]


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 10**9},
        {"multipleOf": 2**32 - 1},
        {"allOf": [{"multipleOf": 2**16}, {"multipleOf": 2**16 + 1}]},
    ],
    ids=str,
)
def test_a_factor_beyond_32_bits_is_refused(forms: Grammars, schema: Any) -> None:
    """llguidance took 9 for a multiple of 2**32 - 1."""
    with pytest.raises(InvalidSampling, match="whose multipleOf has too many digits"):
        accepts(forms, {"type": "integer", **schema}, "")


@pytest.mark.parametrize("factor", [7, 0.01, 2.5, 10**6])
def test_multiples_are_those_of_the_factor(forms: Grammars, factor: float) -> None:
    schema = {"type": "number", "multipleOf": factor}
    assert [
        accepts(forms, schema, str(value)) for value in (0, 3 * factor, 3.1234567 * factor)
    ] == [True, True, False]


@pytest.mark.parametrize("place", ["root", "grammar"])
def test_options_of_llguidance_in_a_schema_change_nothing(forms: Grammars, place: str) -> None:
    """With `lenient` it would ignore what it cannot enforce."""
    schema = {
        "type": "array",
        "uniqueItems": True,
        "x-guidance": {"lenient": True, "item_separator": ";"},
    }
    form = (
        {"json": schema} if place == "root" else {"grammar": f"start: %json {json.dumps(schema)}"}
    )
    with pytest.raises(InvalidSampling, match="uniqueItems"):
        forms.matchers(SamplingParams(structured_outputs=form), END)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [({"const": ODD}, "would be rounded"), (NODE | {"properties": {"next": SELF}}, ANOTHER)],
)
def test_a_schema_in_a_grammar_is_enforced_as_one_alone(
    forms: Grammars, schema: Any, reason: str
) -> None:
    grammar = f'start: "%json" a // %json\na: %json {json.dumps(schema)}'
    with pytest.raises(InvalidSampling, match=reason):
        forms.matchers(SamplingParams(structured_outputs={"grammar": grammar}), END)


def test_bounds_of_64_bits_are_served(forms: Grammars) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert all(accepts(forms, schema, text) for text in ("0", "-7", str(10**18)))
    assert not accepts(forms, schema, str(2**63))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"type": "object", "properties": {"x1": {}}, "patternProperties": {"^x": {}}},
            "property 'x1'",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
            "minProperties",
        ),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, r"#/\$defs/node must hold another"),
        (
            {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}], "$defs": {"node": NODE}},
            "must hold another",
        ),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "value of # must hold another"),
        ({"allOf": [{"$ref": "#"}]}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}]}, "value of # must hold another"),
        (
            {
                "type": ["object", "array"],
                "required": ["a"],
                "properties": {"a": SELF},
                "items": SELF,
                "minItems": 1,
            },
            ANOTHER,
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": SELF}, ANOTHER),
        ({"type": "object", "required": ["a"], "patternProperties": {"^a": SELF}}, ANOTHER),
        ({"type": "object", "minProperties": 1, "additionalProperties": SELF}, ANOTHER),
        (
            {
                "type": "object",
                "minProperties": 1,
                "properties": {"a": SELF},
                "additionalProperties": False,
            },
            ANOTHER,
        ),
        ({"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": SELF}}]}, ANOTHER),
        ({"type": "array", "minItems": 2, "items": [{}], "additionalItems": SELF}, ANOTHER),
        ({"type": "array", "minItems": 1, "allOf": [{"items": SELF}]}, ANOTHER),
        (
            {
                "$ref": "#x",
                "$defs": {"a b": {**NODE, "$anchor": "x", "properties": {"next": {"$ref": "#x"}}}},
            },
            ANOTHER,
        ),
        ({**NODE, "$id": "http://x/y", "properties": {"next": {"$ref": "y"}}}, ANOTHER),
        (
            {
                **NODE,
                "properties": {"next": {"$ref": "#/a%20b"}},
                "a b": {"items": {"$ref": "#"}, "minItems": 1, "type": "array"},
            },
            ANOTHER,
        ),
        (
            {
                "$ref": "#/parts/a",
                "parts": {"a": {"$ref": "#/parts/b"}, "b": {"$ref": "#/parts/a"}},
            },
            "refers to itself",
        ),
    ],
    ids=str,
)
def test_what_would_fail_in_the_middle_is_refused_at_once(
    forms: Grammars, schema: Any, reason: str
) -> None:
    with pytest.raises(InvalidSampling, match=reason):
        accepts(forms, schema, "")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {
                "type": "object",
                "properties": {"next": {"$ref": "#"}},
                "additionalProperties": False,
            },
            '{"next":{}}',
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"anyOf": [SELF, {"type": "null"}]}, "null"),
        ({"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]}, '{"a":null}'),
        ({"type": "object", "additionalProperties": SELF}, '{"a":{}}'),
        ({"oneOf": [{"type": "null"}, {"type": "array", "items": SELF, "minItems": 1}]}, "[null]"),
        ({"type": "null", "$defs": {"node": NODE}}, "null"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/a"}}]}},
            },
            "null",
        ),
        (
            {
                "type": "object",
                "properties": {"y": {}},
                "patternProperties": {"^x": {"type": "null"}},
            },
            '{"x1":null}',
        ),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}'),
    ],
    ids=str,
)
def test_what_ends_is_served(forms: Grammars, schema: Any, text: str) -> None:
    assert accepts(forms, schema, text)


@pytest.mark.parametrize(("name", "time"), [("date", ""), ("date-time", "T10:00:00Z")])
def test_dates_are_those_of_a_calendar(forms: Grammars, name: str, time: str) -> None:
    draw = random.Random(7)
    days = [
        (year, month, day)
        for year in (0, 1900, 2000, 2023, 2024)
        for month in (2, 4, 12)
        for day in (28, 29, 30, 31)
    ]
    days += [(draw.randrange(10_000), draw.randrange(14), draw.randrange(33)) for _ in range(60)]
    schema = {"type": "string", "format": name, "pattern": "^[0-9]"}
    for year, month, day in days:
        try:
            is_date = bool(datetime.date(year, month, day))
        except ValueError:
            is_date = False
        text = f"{year:04}-{month:02}-{day:02}{time}"
        assert accepts(forms, schema, json.dumps(text)) == is_date, text


@pytest.mark.parametrize("pattern", [r"[\s\S]{2}", r"[\W\w]{2}", r"[\d\D]{1,2}"])
def test_a_class_and_its_complement_are_all_characters(forms: Grammars, pattern: str) -> None:
    (matcher,) = forms.matchers(SamplingParams(structured_outputs={"regex": pattern}), END)
    assert matcher is not None
    assert all(matcher.accepts(text) for text in ("é\n", "\u3000\u200d", "\u00a01", "\u0663😀"))
