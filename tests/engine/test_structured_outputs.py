"""Structured outputs: what a completion's text has to be, whatever else a request asks for."""

import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
import torch

from engine import (
    Engine,
    EngineConfig,
    InvalidSampling,
    SamplingParams,
    StructuredOutputsParams,
    json_schema_of,
)
from engine.errors import GrammarFailed
from engine.sampling.edit_logits import edit_logits
from engine.sampling.logit_edits import EditParts, token_mask
from engine.structured import matcher
from engine.structured.matcher import Matcher, Vocabulary
from tests.engine.checkpoints import SHAPES, make_checkpoint
from tests.engine.graphs import simulate_graphs
from tests.engine.structured_cases import generate, run

SEED = 1  # of an answer that is not long
OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99, "minimum": 0},
        "b": {"enum": ["é", "x"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Inner(pydantic.BaseModel):
    default: int


class Named(pydantic.BaseModel):
    kind: Literal["x", "y"]
    inner: Inner


class Open(pydantic.BaseModel, extra="allow"):
    kind: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured") / "model", SHAPES[0])


def engine_of(folder: Path, **options: Any) -> Engine:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "kv_cache_bytes": 1 << 22,
        "dtype": "float32",
        **options,
    }
    return Engine(EngineConfig(model=str(folder), **values))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder) as engine:
        yield engine


def texts(engine: Engine, spec: Any, num_rows: int = 4, **values: Any) -> list[tuple[str, str]]:
    rows = [
        SamplingParams(structured_outputs=spec, **{"seed": seed, "max_tokens": 60, **values})
        for seed in range(num_rows)
    ]
    return [(each.text, each.finish_reason) for each in engine.generate(["hello"] * num_rows, rows)]


def test_generated_schemas_patterns_and_grammars_hold_or_say_why_not(engine: Engine) -> None:
    """Rows without one say what they say alone."""
    num_whole, wrong = run(engine, list(generate(40, seed=5)))
    assert wrong == []
    assert num_whole >= 20


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"choice": ["yes", "no", 'q"\\', "a\nb", ".*"]}, r'yes|no|q"\\|a\nb|\.\*'),
        ({"regex": r"^\d{2}-[é😀]$"}, r"[0-9]{2}-[é😀]"),
        ({"grammar": 'start: "x" start | "y"'}, "x*y"),
        ({"grammar": 'root ::= "x" root | "y"'}, "x*y"),
        (StructuredOutputsParams(json={"type": "integer", "minimum": 3, "maximum": 5}), "[345]"),
        ({"json": '{"const": [1, "é"]}'}, r'\[\s*1\s*,\s*"é"\s*\]'),
    ],
)  # fmt: skip
def test_each_kind_at_any_temperature(engine: Engine, spec: Any, pattern: str) -> None:
    for temperature in (0, 1, 1e6):
        for text, reason in texts(engine, spec, temperature=temperature):
            assert reason == "length" or re.fullmatch(pattern, text), (text, pattern)


@pytest.mark.parametrize(
    "values",
    [
        {"min_tokens": 30}, {"ignore_eos": True}, {"stop": ["1", "}"]}, {"stop_token_ids": [5, 6]},
        {"logprobs": 2}, {"presence_penalty": 2.0, "repetition_penalty": 1.3}, {"bad_words": ["0"]},
        {"logit_bias": {7: 100.0}}, {"skip_special_tokens": False, "ignore_eos": True},
    ],
    ids=str,
)  # fmt: skip
def test_it_holds_beside_any_other_value(engine: Engine, values: dict[str, Any]) -> None:
    found = texts(engine, {"json": OBJECT}, temperature=3.0, **values)
    for text, reason in found:
        if reason == "stop":
            assert json.loads(text).keys() == {"a", "b"}
    assert any(reason == "stop" for _, reason in found)


def test_a_stop_string_ends_it_only_where_the_text_is_whole(engine: Engine) -> None:
    """ "b" stands first where the text before it is none of the grammar."""
    for text, reason in texts(
        engine, {"regex": "(ab)?a{2}b.*"}, stop=["b"], temperature=1e6, num_rows=8
    ):
        assert reason == "length" or re.fullmatch("(ab)?a{2}b.*", text), text


def test_the_length_may_end_it_anywhere_and_says_so(engine: Engine) -> None:
    ((text, reason),) = texts(engine, {"regex": "[ab]{50}"}, num_rows=1, max_tokens=3)
    assert reason == "length"
    assert re.fullmatch("[ab]+", text)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable"),
        ({"json": False}, "no text satisfies it"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}},
            "oneOf constraints are not supported$",
        ),
        ({"json": {"$ref": "https://example.com/x"}}, "not present"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"json": "{"}, "no JSON"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"choice": []}, "list of strings"),
        ({"lark": "a"}, "none of json"),
        ("a+", "must be an object"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(
    engine: Engine, spec: Any, says: str
) -> None:
    with pytest.raises(InvalidSampling, match=says):
        engine.add("1", "hello", SamplingParams(structured_outputs=spec))
    assert not engine.has_unfinished


def test_one_that_fails_while_it_runs_costs_its_row_alone(engine: Engine) -> None:
    rows = [{"regex": "a"}, {"regex": "(a{1000}){1000}"}, {"regex": "b"}]
    one, failed, other = engine.generate(
        ["hello"] * 3, [SamplingParams(structured_outputs=spec) for spec in rows]
    )
    assert (one.text, other.text) == ("a", "b")
    assert failed.finish_reason == "error"
    assert failed.error


def test_a_form_that_has_failed_is_compiled_again(engine: Engine) -> None:
    """Copies of a grammar share a lexer: one row that takes it to its limits costs no later row."""
    grammars, ends = engine._sequences.grammars, engine._sequences.eos_token_ids
    params = SamplingParams(structured_outputs={"regex": "[xy](ab|cd(a{900}){900})[xy]+!"})
    (first,) = grammars.matchers(params, ends)
    assert first is not None
    with pytest.raises(GrammarFailed, match="too many states"):
        follow(engine, first, "xcd" + 20 * "a")
    (later,) = grammars.matchers(params, ends)
    assert later is not None
    follow(engine, later, "xaby!")
    assert later.must_end


def follow(engine: Engine, found: Matcher, text: str) -> None:
    mask = np.zeros((1, found.vocabulary.num_words), np.int32)
    for token_id in engine._tokenizer.encode_alone(text):
        matcher.fill_masks([found], mask)
        found.accept(token_id)


def test_blanks_are_bounded(engine: Engine) -> None:
    """A model that likes nothing better than blanks gives an object all the same."""
    answer = blank_answer(engine, {"json": OBJECT, "allow_whitespace": True}, 400)
    assert json.loads(answer)
    assert len(answer) > len(compact(answer))


@pytest.mark.parametrize("form", [{"json": OBJECT}, {"json": Named}, Named])
def test_json_is_compact_unless_blanks_are_allowed(engine: Engine, form: Any) -> None:
    answer = blank_answer(engine, form, 60)
    assert answer == compact(answer)


def test_a_class_stands_for_its_schema_without_other_keys() -> None:
    inner = {"properties": {"default": {"title": "Default", "type": "integer"}}}
    schema = json_schema_of(Named)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["additionalProperties"] is False
    assert schema["$defs"]["Inner"]["properties"] == inner["properties"]
    assert json_schema_of(Open)["additionalProperties"] is True
    assert json_schema_of({"type": "object"}) == {"type": "object"}


def compact(text: str) -> str:
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


def blank_answer(engine: Engine, form: Any, max_tokens: int) -> str:
    """Return what a model writes that prefers blanks and the end of the text to all else."""
    blanks = engine._tokenizer.encode_alone(" ") + engine._tokenizer.encode_alone("\n")
    bias = dict.fromkeys(blanks, 100.0)
    params = SamplingParams(
        structured_outputs=form, logit_bias=bias, max_tokens=max_tokens, seed=SEED
    )
    (answer,) = engine.generate(["hello"], params)
    assert answer.finish_reason == "stop"
    return answer.text


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"async_scheduling": True, "kv_cache_bytes": 1 << 17, "max_model_len": 96, "block_size": 4},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"tensor_parallel_size": 2},
    ],
    ids=("overlap", "preempted", "chunked", "ranks"),
)
def test_it_says_the_same_however_it_is_computed(
    folder: Path, engine: Engine, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    specs: list[Any] = [
        {"json": OBJECT},
        None,
        {"regex": "[a-z]{20}"},
        {"choice": ["yes", "no"]},
        None,
        {"json_object": True, "allow_whitespace": True},
    ]
    rows = [
        SamplingParams(structured_outputs=spec, seed=i, max_tokens=30, temperature=1.0)
        for i, spec in enumerate(specs)
    ]
    prompts = [f"this is prompt number {i}, of some length" for i in range(len(rows))]
    expected = [each.token_ids for each in engine.generate(prompts, rows)]
    with engine_of(folder, **options) as other:
        assert [each.token_ids for each in other.generate(prompts, rows)] == expected
        assert "a step raised" not in caplog.text
        assert other.stats().num_preemptions > 0 or "block_size" not in options


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_beside_one_with_a_grammar_do_not_wait_for_it(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Each step is scheduled while the one before is under way; the row with the grammar is in every other one."""
    specs: list[Any] = [{"regex": "[a-z]{20}"}, *[None] * 7]
    rows = [
        SamplingParams(structured_outputs=spec, seed=i, max_tokens=30, ignore_eos=spec is None)
        for i, spec in enumerate(specs)
    ]
    prompts = [f"this is prompt number {i}, of some length" for i in range(len(rows))]
    expected = [each.token_ids for each in engine.generate(prompts, rows)]
    if graphs:
        simulate_graphs(monkeypatch)
    with engine_of(folder, async_scheduling=True, max_num_batched_tokens=1000) as other:
        in_flight: list[int] = []
        schedule = other._scheduler.schedule

        def record(*arguments: Any) -> Any:
            in_flight.append(len(other._scheduler.in_flight))
            return schedule(*arguments)

        monkeypatch.setattr(other._scheduler, "schedule", record)
        assert [each.token_ids for each in other.generate(prompts, rows)] == expected
        num_steps = other.stats().num_steps
    assert in_flight == [0, *[1] * (num_steps - 1), *in_flight[num_steps:]]
    assert num_steps == 30, "a step for each token of the longest"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_a_cpu_masks_logits_as_the_reference_does(dtype: torch.dtype) -> None:
    """Vocabularies of no whole words, masks that are shorter and longer than those, rows that lie apart."""
    pytest.importorskip(
        "numba", reason="numba is not installed, so the CPU kernels cannot be compiled"
    )
    from engine.attention.cpu_backend import CpuBackend

    backend, rng, rows = (
        CpuBackend(torch.device("cpu")),
        np.random.default_rng(3),
        np.array([0, 2, 3, 5, 8]),
    )
    for vocab, longest in ((1, 1), (31, 90), (32, 32), (33, 33), (70, 32), (300, 320)):
        for kind in ("masks alone", "banned", "biased"):
            parts = EditParts()
            for place, share in enumerate((0.0, 0.5, 0.9, 1.0)):
                size = longest if place % 2 else min(longest, vocab)
                allowed = np.flatnonzero(rng.random(size) < share)
                parts.allow(place, token_mask(allowed.tolist(), size))
            if kind == "banned":
                parts.banned.append((4, np.array([0])))
            if kind == "biased":
                parts.biased.append((4, np.array([vocab - 1])))
                parts.biases.append(np.array([0.3], np.float32))
            edits = parts.joined(rows)
            logits = torch.from_numpy(rng.normal(size=(9, 2 * vocab))).to(dtype)
            logits[5, 0] = torch.nan
            expected = edit_logits(logits.clone()[:, :vocab], edits)
            found = backend.edit(logits.clone()[:, :vocab], edits, None)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Machine:
    """A grammar that allows all tokens; a mask of it takes as long as is said, on a clock of the test's."""

    def __init__(self, clock: list[float], took_s: float) -> None:
        self._clock, self._took_s = clock, took_s

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._clock[0] += self._took_s
        ctypes.memset(address, 255, num_bytes)

    def is_accepting(self) -> bool:
        return False

    def get_error(self) -> str:
        return ""


class Executor:
    """In the place of llguidance's."""

    def unsafe_compute_mask_ptr(
        self, machines: list[tuple[Machine, int]], address: int, num_bytes: int, num_masks: int
    ) -> None:
        assert len(machines) == num_masks
        for machine, row in machines:
            machine.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)


@pytest.mark.parametrize("large", [False, True])
def test_a_row_whose_mask_takes_too_long_fails_alone(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of a large vocabulary are timed together: there it is found in the step after that."""
    clock = [0.0]
    monkeypatch.setattr(matcher.time, "monotonic", lambda: clock[0])
    executor: Any = Executor() if large else None
    eos_words, eos_bits = np.array([0]), np.array([1], np.int32)
    vocabulary = Vocabulary(
        2,
        eos_words,
        eos_bits,
        frozenset([0]),
        lambda text: [],
        is_canonical=True,
        executor=executor,
    )
    rows: list[Any] = [
        Matcher(machine, machine, vocabulary, frozenset(), None)  # type: ignore[arg-type]
        for machine in (
            Machine(clock, 0.1),
            Machine(clock, 3.0),
            Machine(clock, 1.5),
            Machine(clock, 0.1),
        )
    ]
    for step in range(2 if large else 1):
        assert not any(row.error for row in rows), step
        words = np.zeros((4, 2), np.int32)
        matcher.fill_step_masks(rows, words)
    assert [row.error for row in rows] == [
        None, "its next token takes too long to find (3.0 s)", None, None
    ]  # fmt: skip
    assert words.tolist() == [[-2, -1], [0, 0], [-2, -1], [-2, -1]], "the end is no token of theirs"
    with pytest.raises(GrammarFailed, match="too long"):
        rows[1].accept(-1)
