"""What rows ask has names of 128 bits, which lie beside the parts and are found again among millions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.context.served_model import PinnedModel
from jobs.parquet.asks.row_keys import RowKeys, as_keys, model_mark
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.old_runs import KnownKeys
from jobs.runs.plans.spec import RunSpec

ROW = Row("a prompt")


def keys_of(input: Any = "in", output: str = "out", version: str = "", **arguments: Any) -> RowKeys:
    return RowKeys(RunSpec.from_arguments(input, output, **arguments), None, version)


@pytest.mark.parametrize(
    "other",
    [
        {"input": ["other", "files"], "output": "elsewhere"},
        {
            "rows_per_shard": 7,
            "limit": 10,
            "keep": ["id"],
            "output_prefix": "x_",
            "single_file": "csv",
        },
        {"prompt_column": None, "template": "{text}"},  # the row's prompt is what it makes
        {"sampling_columns": {"temperature": "t"}},  # whose values are the row's
        {"sampling": {"temperature": 0}},  # which is 0.0
    ],
)
def test_where_rows_come_from_and_how_they_are_written_is_not_in_their_keys(
    other: dict[str, Any],
) -> None:
    base = {} if "sampling" not in other else {"sampling": {"temperature": 0.0}}
    assert keys_of(**other).key_of(ROW) == keys_of(**base).key_of(ROW)


def test_what_decides_an_answer_is_in_the_key() -> None:
    prompts = [{"name": "x", "template": "{text}"}]
    asked: list[dict[str, Any]] = [
        {},
        {"sampling": {"max_tokens": 5}},
        {"sampling": {"seed": 5}},
        {"labels": ["yes", "no"]},
        {"task": "embed"},
        {"messages_column": "chat"},
        {"check": {"regex": "a+"}},
        {"check": {"function": "a.b"}},
        {"check": {"function": "a.b"}, "version": "another"},
        {"prompts": prompts},
        {"prompts": prompts, "defaults": {"text": "-"}},
    ]
    assert len({keys_of(**each).key_of(ROW) for each in asked}) == len(asked)


def test_the_order_of_a_schemas_properties_is_in_the_key() -> None:
    def key(*names: str) -> bytes:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        return keys_of(sampling={"structured_outputs": {"json": schema}}).key_of(ROW)

    assert key("reason", "label") != key("label", "reason")


@given(
    st.lists(
        st.tuples(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3)),
        unique=True,
        max_size=20,
    )
)
def test_rows_that_ask_otherwise_have_other_keys(rows: list[tuple[str, str, str]]) -> None:
    keys = keys_of()
    assert len({keys.key_of(Row(*row)) for row in rows}) == len(rows)


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    assert keys_of().key_of(ROW).hex() == "96ce01518be388440cb2ffeec57a0364"
    assert (
        model_mark(PinnedModel("m", "fingerprint", "float32")).tobytes().hex()
        == "57a72c1ec364dc5be43d42d98cae832c"
    )


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_equal_keys_are_found_in_turn(known: list[int], wanted: list[int]) -> None:
    def keys(numbers: Sequence[int]) -> Any:
        return as_keys(
            b"".join(number.to_bytes(8, "little") + bytes([number > 0]) * 8 for number in numbers)
        )

    index = KnownKeys(keys(known))
    found = index.find(keys(wanted)).tolist()
    turns: dict[int, int] = {}
    for number, place in zip(wanted, found, strict=True):
        equal = [at for at, each in enumerate(known) if each == number]
        if number == 0 or not equal:
            assert place == -1
        else:
            assert place == equal[turns.get(number, 0) % len(equal)]
            turns[number] = turns.get(number, 0) + 1


def test_keys_that_share_their_first_half_alone_are_not_taken_for_each_other() -> None:
    index = KnownKeys(np.array([[1, 1], [1, 2], [2, 1]], np.uint64))
    asked = np.array([[1, 2], [1, 3], [2, 1], [2, 2], [0, 0]], np.uint64)
    assert index.find(asked).tolist() == [1, -1, 2, -1, -1]
