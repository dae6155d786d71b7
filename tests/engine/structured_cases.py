"""Generated schemas, patterns, choices and grammars, half of them nasty, and what their answers lack."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine import Completion, Engine, SamplingParams

WORDS = (
    "a",
    "name",
    "größe",
    "名前",
    "x-y",
    "a b",
    'q"q',
    "back\\slash",
    "😀",
    "é",
    "__proto__",
    "1",
)
MAX_TOKENS = 160


@dataclass(frozen=True)
class Case:
    """What a row asks for, and whether a whole text is right."""

    spec: dict[str, Any]
    is_right: Callable[[str], bool]


def generate(num_cases: int, seed: int) -> Iterator[Case]:
    """Cases, every second one nasty."""
    draw = random.Random(seed)
    for number in range(num_cases):
        makers = NASTY if number % 2 else PLAIN
        yield draw.choice(makers)(draw)


def _of_schema(schema: Any) -> Case:
    from jsonschema import Draft202012Validator

    def is_right(text: str) -> bool:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))

    return Case({"json": schema}, is_right)


def _of_regex(pattern: str) -> Case:
    return Case({"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


def plain_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Types, bounds, enums, arrays and objects, all of them satisfiable."""
    kind = draw.choice(
        ["integer", "number", "string", "boolean", "null", "enum", "array", "object", "anyOf"]
    )
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
        return {
            "enum": draw.sample([*WORDS, 1, -2.5, None, True, [1], {"a": 1}], draw.randint(1, 5))
        }
    if kind == "array":
        least = draw.randint(0, 2)
        items = plain_schema(draw, depth + 1)
        return {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + draw.randint(0, 3),
        }
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
    "properties": {
        "v": {"type": "boolean"},
        "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
    },
}
#: Recursive, with bounds, unsatisfiable, with what no grammar enforces, large, with references to nothing.
NASTY_SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    {"type": "string", "pattern": r"^\d{1,3}(\.\d{1,3}){3}$", "maxLength": 20},
    {"type": "number", "minimum": 0.25, "exclusiveMaximum": 0.5},
    {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 90},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 3}]},
    {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}},
    {"type": "object", "patternProperties": {"^x[0-9]$": {}}, "additionalProperties": False},
    {"type": "string", "minLength": 100_000},
    {"const": {"ключ": [1, "\u2028", None, {"😀": 1e-7}]}},
    {"enum": [f"größe {i}" for i in range(3000)]},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/nothing"},
    True,
)
PATTERNS = (r"\d{2}(yes|no)", r"[a-f]+x?é", r"\w{1,5}-\s", r"[^\n]{3}\.(ab)*c")
NASTY_PATTERNS = (
    *(
        r"\W{4}",
        r"[^\W\d]{4}",
        "😀{2,3}[é-ü]",
        r"(a{1000}){1000}",
        r"(?=a)b",
        r"(a)\1",
        "(",
        "[]",
        "",
        "^ab$",
    ),
    *(
        r"(x+x+)+y",
        "(a|b|ab)*c",
        r"[\]\\^-]{3}",
        "(?i)straße",
        r"a{1,1000000}",
        r"\u00e9\x41",
        "$^",
    ),
)
CHOICES = (
    ["a", "ab", "abc"],
    ["", "x"],
    ["a\nb", "*", ".+", "$"],
    [f"x-y/{i}" for i in range(2000)],
)
#: Each with a pattern for the same texts; for those that are none, or have none, nothing is right.
GRAMMARS = (
    ('start: "a" | "b" start', "b*a"),
    ('root ::= [0-9]+ ("-" [a-z])*', "[0-9]+(-[a-z])*"),
    ('start: A B\nA: /[a-z]{1,3}/\nB: "é😀"', "[a-z]{1,3}é😀"),
    ('start: start "a" | "b"', "ba*"),
    ("start: start", "(?!)"),
    ("nonsense", "(?!)"),
    ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "a"),
)


def _choice(draw: random.Random) -> Case:
    texts = draw.choice(CHOICES)
    return Case({"choice": texts}, lambda text: text in texts)


def _grammar(draw: random.Random) -> Case:
    grammar, pattern = draw.choice(GRAMMARS)
    return Case({"grammar": grammar}, lambda text: re.fullmatch(pattern, text) is not None)


PLAIN: list[Callable[[random.Random], Case]] = [
    lambda draw: _of_schema(plain_schema(draw)), lambda draw: _of_regex(draw.choice(PATTERNS)), _choice,
]  # fmt: skip
NASTY: list[Callable[[random.Random], Case]] = [
    lambda draw: _of_schema(draw.choice(NASTY_SCHEMAS)), lambda draw: _of_regex(draw.choice(NASTY_PATTERNS)),
    _grammar,
]  # fmt: skip


def problem(case: Case, completion: Completion) -> str | None:
    """What is wrong with a row's answer, None if nothing is."""
    if completion.finish_reason == "stop":
        return (
            None if case.is_right(completion.text) else f"{completion.text!r} does not satisfy it"
        )
    if completion.finish_reason == "error":
        return None if completion.error else "it failed without a reason"
    return (
        None if completion.finish_reason == "length" else f"it ended by {completion.finish_reason}"
    )


def run(engine: Engine, cases: list[Case]) -> tuple[int, list[str]]:
    """Complete a row for each, and free ones among them; return how many ended whole, and what is wrong."""
    heats = (0, 1, 3, 1e6)
    asked = [
        SamplingParams(
            structured_outputs=case.spec, max_tokens=MAX_TOKENS, temperature=heats[i % 4], seed=i
        )
        for i, case in enumerate(cases)
    ]
    free = [SamplingParams(max_tokens=24, temperature=1, seed=i) for i in range(len(cases) // 10)]
    alone = engine.generate(["Free:"] * len(free), free)
    done = engine.generate([*["Row:"] * len(asked), *["Free:"] * len(free)], [*asked, *free])
    answers, beside = done[: len(asked)], done[len(asked) :]
    wrong = [
        f"{json.dumps(case.spec)[:200]}: {found[:300]}"
        for case, answer in zip(cases, answers, strict=True)
        if (found := problem(case, answer)) is not None
    ]
    wrong += [
        f"a free row says {answer.text!r} beside others, and something else alone"
        for own, answer in zip(alone, beside, strict=True)
        if own.token_ids != answer.token_ids
    ]
    return sum(answer.finish_reason == "stop" for answer in answers), wrong
