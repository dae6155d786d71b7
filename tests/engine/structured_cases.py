"""Generated schemas, patterns, choices and grammars, half of them nasty, and what their answers lack.

Each case is one row, at a temperature between the model's own and one at which all tokens are alike. A row
that stops must satisfy `jsonschema` or `re`; any other must say why: its length, or an error of its own. Rows
without a grammar run among them, and must say what they say alone.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine import Completion, Engine, SamplingParams

WORDS = ("a", "name", "größe", "名前", "x-y", "a b", 'q"q', "back\\slash", "😀", "é", "__proto__", "1")
FREE_EVERY = 10  # rows of which one has no grammar
MAX_TOKENS = 160


@dataclass(frozen=True)
class Case:
    """What a row asks for, and whether a whole text is right. kind: for the counts."""

    kind: str
    spec: dict[str, Any]
    is_right: Callable[[str], bool]


def generate(num_cases: int, seed: int) -> Iterator[Case]:
    """Cases, every second one nasty."""
    draw = random.Random(seed)
    for number in range(num_cases):
        makers = NASTY if number % 2 else PLAIN
        yield draw.choice(makers)(draw)


def _of_schema(kind: str, schema: Any) -> Case:
    from jsonschema import Draft202012Validator

    def is_right(text: str) -> bool:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))

    return Case(kind, {"json": schema}, is_right)


def _of_regex(kind: str, pattern: str) -> Case:
    return Case(kind, {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


def plain_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Types, bounds, enums, arrays and objects, all of them satisfiable."""
    kind = draw.choice(["integer", "number", "string", "boolean", "null", "enum", "array", "object", "anyOf"])
    if depth > 2 and kind in ("array", "object", "anyOf"):
        kind = "integer"
    if kind in ("integer", "number"):
        low = draw.randint(-1000, 1000)
        return draw.choice(
            [{"type": kind, "minimum": low, "maximum": low + draw.randint(1, 500)}, {"type": kind}]
        )
    if kind == "string":
        least = draw.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}
    if kind == "enum":
        return {"enum": draw.sample([*WORDS, 1, -2.5, None, True, [1], {"a": 1}], draw.randint(1, 5))}
    if kind == "array":
        least = draw.randint(0, 2)
        items = plain_schema(draw, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [plain_schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "object":
        names = draw.sample(WORDS, draw.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: plain_schema(draw, depth + 1) for name in names},
            "required": names[: draw.randint(0, len(names))],
            "additionalProperties": False,
        }
    return {"type": kind}


NODE = {
    "type": "object",
    "required": ["v"],
    "additionalProperties": False,
    "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
}
ENDLESS = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/n"}}}
PATTERNS = (r"^[A-Z]{2}\d{3}$", r"^(ab|cd)+$", "^é{2,4}$", "^[^a-z]{3}$", r"^\d{1,3}(\.\d{1,3}){3}$")
NASTY_SCHEMAS: tuple[tuple[str, Any], ...] = (
    ("recursive", {"$ref": "#/$defs/n", "$defs": {"n": NODE}}),
    ("endless", {"$ref": "#/$defs/n", "$defs": {"n": ENDLESS}}),
    *(("pattern", {"type": "string", "pattern": pattern, "maxLength": 20}) for pattern in PATTERNS),
    ("tight bounds", {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5}),
    ("multiple", {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 90}),
    ("unsatisfiable", {"type": "integer", "minimum": 3, "maximum": 2}),
    ("unsatisfiable", {"enum": []}),
    ("unsatisfiable", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ("unsatisfiable", {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}),
    ("not enforced", {"not": {"type": "string"}}),
    ("not enforced", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
    ("not enforced", {"if": {"type": "string"}, "then": {"minLength": 3}}),
    ("not enforced", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("oneOf", {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 3}]}),
    ("oneOf of one", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("allOf", {"allOf": [{"type": "integer", "minimum": -4}, {"maximum": 5}]}),
    ("many properties", {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}}),
    ("keys", {"type": "object", "patternProperties": {"^x[0-9]$": {}}, "additionalProperties": False}),
    ("long", {"type": "string", "minLength": 100_000}),
    ("const", {"const": {"ключ": [1, "\u2028", None, {"😀": 1e-7}]}}),
    ("tuple", {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": [1, True]}], "items": False}),
    ("remote", {"$ref": "https://example.com/schema.json"}),
    ("dangling", {"$ref": "#/$defs/nothing"}),
    ("no type", {"type": "number-ish"}),
    ("annotated", {"title": "t", "description": "d", "default": 1, "examples": [2], "type": "boolean"}),
    ("any", True),
    ("none", False),
)


def _nasty_schema(draw: random.Random) -> Case:
    if draw.random() < 0.2:
        texts = [f"{draw.choice(WORDS)}{i}" for i in range(draw.randint(1000, 5000))]
        return _of_schema("schema: enum of thousands", {"enum": texts})
    if draw.random() < 0.1:
        deep = plain_schema(draw, 1)
        for _ in range(draw.randint(5, 200)):
            deep = {"type": "array", "items": deep, "minItems": 1, "maxItems": 1}
        return _of_schema("schema: deep", deep)
    name, schema = draw.choice(NASTY_SCHEMAS)
    return _of_schema(f"schema: {name}", schema)


NASTY_PATTERNS = (
    *(
        r"\W{4}",
        r"[^\W\d]{4}",
        r"[\S]{3}\S\D",
        r"[^\w\s]{3}",
        "😀{2,3}[é-ü]",
        r"(a{100}){50}",
        r"(a{1000}){1000}",
    ),
    *(r"(?=a)b", r"(a)\1", r"\bfoo\b", "(", "a{3,1}", "[]", r"(x+x+)+y", "(a|b|ab)*c", "", "^ab$", r"a\Z"),
    *("[]a]{3}", r"[\]\\^-]{3}", "(?i)straße", r"(?:.*a){5}", r"a{1,1000000}", "[[a]", r"\u00e9\x41", "$^"),
)


def _plain_regex(draw: random.Random) -> Case:
    pieces = [
        r"\d{2}",
        r"[a-f]+",
        "(yes|no)",
        r"\w{1,5}",
        r"\s",
        "x?",
        "é",
        "[^\n]{3}",
        "-",
        r"\.",
        "(ab)*c",
        ".",
    ]
    return _of_regex("regex", "".join(draw.choices(pieces, k=draw.randint(1, 5))))


def _nasty_regex(draw: random.Random) -> Case:
    return _of_regex("regex: nasty", draw.choice(NASTY_PATTERNS))


def _choice(draw: random.Random) -> Case:
    many = [f"{draw.choice(WORDS)}/{i}" for i in range(draw.randint(1000, 4000))]
    few = draw.sample(WORDS, 3)
    texts = draw.choice([few, many, ["a", "ab", "abc"], ["", "x"], ["a\nb", "*", ".+", "$"]])
    return Case("choice", {"choice": texts}, lambda text: text in texts)


def _grammar(draw: random.Random) -> Case:
    """Each with a pattern for the same texts; for those that are none, or have none, nothing is right."""
    grammar, pattern = draw.choice(
        [
            ('start: "a" | "b" start', "b*a"),
            ('root ::= "x" root | "y"', "x*y"),
            ('root ::= [0-9]+ ("-" [a-z])*', "[0-9]+(-[a-z])*"),
            ('start: A B\nA: /[a-z]{1,3}/\nB: "é😀"', "[a-z]{1,3}é😀"),
            ('start: item ("," item)*\nitem: /[0-9]{1,3}/', "[0-9]{1,3}(,[0-9]{1,3})*"),
            ('start: start "a" | "b"', "ba*"),
            ('start: "(" start ")" | "x"', r"\(*x\)*"),
            ("start: start", "(?!)"),
            ("start: missing", "(?!)"),
            ("nonsense", "(?!)"),
            ("", "(?!)"),
            ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "a"),
            ('start: a\na: b\nb: a | "z"', "z"),
        ]
    )
    return Case("grammar", {"grammar": grammar}, lambda text: re.fullmatch(pattern, text) is not None)


def _plain_schema(draw: random.Random) -> Case:
    return _of_schema("schema", plain_schema(draw))


PLAIN: list[Callable[[random.Random], Case]] = [_plain_schema, _plain_schema, _plain_regex, _choice]
NASTY: list[Callable[[random.Random], Case]] = [_nasty_schema, _nasty_schema, _nasty_regex, _grammar]


def problem(case: Case, completion: Completion) -> str | None:
    """What is wrong with a row's answer, None if nothing is."""
    if completion.finish_reason == "stop":
        try:
            right = case.is_right(completion.text)
        except ValueError as error:
            return f"{completion.text!r} cannot be read: {error}"
        return None if right else f"{completion.text!r} does not satisfy it"
    if completion.finish_reason == "error":
        return None if completion.error else "it failed without a reason"
    return None if completion.finish_reason == "length" else f"it ended by {completion.finish_reason}"


def run(engine: Engine, cases: list[Case], seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Complete a row for each, and free ones among them; return the ends of each kind, and what is wrong."""
    draw = random.Random(seed)
    rows = [
        SamplingParams(
            structured_outputs=case.spec,
            max_tokens=MAX_TOKENS,
            temperature=draw.choice([0, 1, 3, 1e6]),
            seed=i,
        )
        for i, case in enumerate(cases)
    ]
    free = {i: SamplingParams(max_tokens=24, temperature=1, seed=i) for i in range(0, len(cases), FREE_EVERY)}
    prompts = {i: f"Free {i}:" for i in free}
    alone = engine.generate(list(prompts.values()), list(free.values()))
    asked: list[tuple[str, SamplingParams]] = []
    for i, row in enumerate(rows):
        asked.append((f"Row {i}:", row))
        if i in free:
            asked.append((prompts[i], free[i]))
    done = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    answers = [answer for answer, (_, row) in zip(done, asked, strict=True) if row.structured_outputs]
    beside = [answer for answer, (_, row) in zip(done, asked, strict=True) if not row.structured_outputs]
    ends: Counter[tuple[str, str]] = Counter()
    wrong = []
    for case, answer in zip(cases, answers, strict=True):
        ends[case.kind, answer.finish_reason] += 1
        if (found := problem(case, answer)) is not None:
            wrong.append(f"{case.kind} {json.dumps(case.spec)[:200]}: {found[:300]}")
    for own, answer in zip(alone, beside, strict=True):
        if own.token_ids != answer.token_ids:
            wrong.append(f"a free row says {answer.text!r} beside others, and something else alone")
    return ends, wrong
