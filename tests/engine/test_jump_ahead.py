"""Tokens that a grammar forces are appended without a pass for each, others are guessed: the same, in fewer steps."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, SamplingParams
from engine.structured.matcher import Matcher
from tests.engine.accounting import check_accounting
from tests.engine.checkpoints import SHAPES, make_checkpoint
from tests.engine.structured_cases import generate
from tests.engine.text_models import make_text_model

KEYS = ["customer name", "delivery_address", "größe", "don't 1234"]
SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "integer", "minimum": 0, "maximum": 99} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
CASES = [case.spec for case in generate(60, seed=11)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("jump") / "model", SHAPES[0])


def engine_of(folder: Path, **options: Any) -> Engine:
    values = {"max_num_seqs": 8, "kv_cache_bytes": 1 << 21, "dtype": "float32", **options}
    return Engine(EngineConfig(model=str(folder), **values))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with engine_of(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def sentencepiece_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Tokens with a space before them, bytes as pieces, and the model's last ids without a token."""
    folder = make_checkpoint(tmp_path_factory.mktemp("pieces") / "model", SHAPES[0])
    make_text_model(folder.parent / "text", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder.parent / "text" / name, folder)
    with engine_of(folder) as engine:
        yield engine


def answers(
    engine: Engine, rows: list[SamplingParams], *, jumps: bool = True
) -> tuple[list[Any], int]:
    """Tokens, ends and errors of each row, and the passes that they took."""
    before = engine.stats().num_steps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.structured.grammars.LIMIT_S", 60.0
        )  # a loaded machine refuses no form here
        if not jumps:
            patch.setattr(Matcher, "forced", lambda self: [])
            patch.setattr(engine._stepper, "drafts", None)
        found = engine.generate(["hello"] * len(rows), rows)
    shown = [(each.token_ids, each.text, each.finish_reason, each.error) for each in found]
    return shown, engine.stats().num_steps - before


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([{"json": SCHEMA}, *CASES]),
            st.sampled_from([0, 1.0, 1e6]),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(
        [{}, {"min_tokens": 3}, {"presence_penalty": 1.0}, {"stop": ["1", '"']}, {"max_tokens": 9}]
    ),
)
def test_tokens_are_those_without_it(
    engine: Engine, rows: list[tuple[dict[str, Any], float, int]], values: dict[str, Any]
) -> None:
    """Greedy and drawn, in batches of other grammars, with whatever else a request asks for."""
    params = [
        SamplingParams(
            **{
                "max_tokens": 40,
                "structured_outputs": spec,
                "temperature": heat,
                "seed": seed,
                **values,
            }
        )
        for spec, heat, seed in rows
    ]
    assert answers(engine, params)[0] == answers(engine, params, jumps=False)[0]


def test_so_with_pieces_of_sentencepiece(sentencepiece_engine: Engine) -> None:
    rows = [
        SamplingParams(structured_outputs=spec, max_tokens=90, seed=seed, temperature=seed % 2)
        for seed, spec in enumerate([{"json": SCHEMA}, {"choice": ["Der März", "Der Mai 😀"]}] * 4)
    ]
    found, num_steps = answers(sentencepiece_engine, rows)
    same, num_others = answers(sentencepiece_engine, rows, jumps=False)
    assert found == same
    assert num_steps < num_others / 2
    for _, text, end, _ in found[::2]:
        assert end == "stop"
        assert json.loads(text).keys() == set(KEYS)
    assert {text for _, text, _, _ in found[1::2]} <= {"Der März", "Der Mai 😀"}


def test_a_form_keeps_its_first_space_behind_special_tokens_alone(
    sentencepiece_engine: Engine,
) -> None:
    engine = sentencepiece_engine
    for text in (" a", "a", "  März"):
        params = SamplingParams(
            structured_outputs={"choice": [text]}, max_tokens=20, stop=["never"]
        )
        (answer,) = engine.generate([engine._tokenizer.prefix], params)
        assert (answer.text, answer.finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"kv_cache_bytes": 1 << 18}, {"max_num_batched_tokens": 10}],
    ids=str,
)
def test_so_with_steps_in_flight_preemption_and_chunks(
    folder: Path, options: dict[str, Any]
) -> None:
    rows = [
        SamplingParams(
            structured_outputs={"json": SCHEMA}, max_tokens=90, seed=seed, temperature=seed % 3
        )
        for seed in range(12)
    ]
    with engine_of(folder, max_model_len=128, **options) as engine:
        found, _ = answers(engine, rows)
        check_accounting(engine._scheduler)
        if "kv_cache_bytes" in options:
            assert engine.stats().num_preemptions
        assert found == answers(engine, rows, jumps=False)[0]
    assert {end for _, _, end, _ in found} == {"stop"}
