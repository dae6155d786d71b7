"""Answers that are in no part yet stand in one format, which gives back what was written or says why not."""

import errno
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.common.keys import FORMAT
from jobs.context.answers import Answer
from jobs.context.served_model import PinnedModel
from jobs.errors import AnswersDamaged
from jobs.items.records import PlainCompletion, PlainLogprob, Progress
from jobs.parquet.asks.kinds import kind_of
from jobs.parquet.asks.row_keys import as_keys, model_mark, whole_keys
from jobs.parquet.files.storage import Storage
from jobs.parquet.outputs.part import answer_column
from jobs.parquet.reuse.answer_log import AnswerLog, Record, log_owner
from jobs.runs.plans.plan import Plan, Shard
from jobs.runs.plans.spec import RunSpec

#: Logs are read in child processes.
pytestmark = pytest.mark.processes

NUM_ROWS = 5
MODEL = PinnedModel("m", "fingerprint of m", "float32")
MARK = model_mark(MODEL).tobytes()
OTHER_MARK = model_mark(replace(MODEL, fingerprint="another")).tobytes()
KEYS = as_keys(bytes(range(16 * NUM_ROWS)))
EMBEDDING_SIZE = 3

STEPS = [
    {"name": "why", "template": "{text}", "sampling": {"logprobs": 1}},
    {"name": "label", "template": "{why} {text}"},
]
KINDS: dict[str, dict[str, Any]] = {
    "texts": {},
    "samples": {"sampling": {"n": 2, "logprobs": 1}},
    "log probabilities": {"sampling": {"logprobs": 2, "prompt_logprobs": 1}},
    "attempts": {"check": {"regex": "a+"}},
    "votes": {"agree": 0.5, "max_samples": 4},
    "several prompts": {"prompts": STEPS, "labels": ["a", "b"]},
    "labels": {"labels": ["a", "b"]},
    "embeddings": {"task": "embed"},
    "classes": {"task": "classify"},
    "relevance": {"task": "rerank", "query_column": "query", "document_column": "document"},
    "batch lines": {"input_format": "openai-batch"},
}


def plan_of(**arguments: Any) -> Plan:
    spec = RunSpec.from_arguments("in", "out", **arguments)
    return Plan(spec, 7, MODEL, "0", (), (Shard(0, 0, NUM_ROWS, 0, 1, 0),))


def fields_of(plan: Plan) -> list[pa.Field]:
    return list(kind_of(plan.spec).fields(plan.spec, EMBEDDING_SIZE))


def log_of(plan: Plan, **changes: Any) -> AnswerLog:
    log = AnswerLog(log_owner(plan, 0, "asked"), KEYS, fields_of(plan))
    return replace(log, **changes)


# Values of answers


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values as asks put them into a column of this type."""
    if pa.types.is_string(kind):
        return st.text(max_size=4)
    if pa.types.is_integer(kind):
        return st.integers(0, 1 << 40)
    if pa.types.is_floating(kind):
        return st.floats(0, 1)
    if pa.types.is_map(kind):
        return st.lists(st.tuples(st.text(max_size=2), st.floats(0, 1)), max_size=2).map(tuple)
    if pa.types.is_fixed_size_list(kind):
        numbers = st.floats(-1, 1, width=32)
        size = kind.list_size
        return st.lists(numbers, min_size=size, max_size=size).map(lambda some: array("f", some))
    if "struct<" in str(kind):
        return nested_values(kind).map(lambda value: pa.array([value], kind))
    return st.lists(values_of(kind.value_type), min_size=2, max_size=2).map(tuple)


def nested_values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.lists(nested_values(kind.value_type), max_size=2)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({part.name: nested_values(part.type) for part in kind})
    if pa.types.is_integer(kind):
        return st.integers(0, 1000)
    return values_of(kind)


def answers_of(fields: Sequence[pa.Field]) -> st.SearchStrategy[Answer]:
    strategies = {field.name: st.none() | values_of(field.type) for field in fields}
    for name in ("prompt_tokens", "cached_tokens"):
        strategies[name] = st.integers(0, 1000)
    sources = st.none() | st.text(max_size=3)
    return st.builds(_answer, st.fixed_dictionaries(strategies), sources)


def _answer(values: dict[str, Any], source: str | None) -> Answer:
    known: dict[str, Any] = {"completion": None, "finish_reason": "stop", "completion_tokens": 0}
    columns = {}
    for name, value in values.items():
        if name in Answer.__dataclass_fields__:
            known[name] = value
        else:
            columns[name] = value
    return Answer(**known, columns=columns, reused=source)


TOKENS = st.lists(st.integers(0, 1 << 20), max_size=3)
LOGPROBS = st.builds(
    PlainLogprob, st.floats(-9, 0), st.integers(1, 9), st.text(max_size=2), st.none() | st.binary()
)
COMPLETIONS = st.builds(
    PlainCompletion,
    index=st.integers(0, 3),
    token_ids=TOKENS,
    text=st.text(max_size=4),
    finish_reason=st.sampled_from(["stop", "length"]),
    num_prompt_tokens=st.integers(0, 9),
    logprobs=st.none() | st.lists(st.dictionaries(st.integers(0, 9), LOGPROBS), max_size=2),
    error=st.none() | st.text(max_size=3),
)
SAMPLES = st.lists(COMPLETIONS, min_size=1, max_size=2)
PROGRESS = st.builds(
    Progress,
    replies=st.lists(st.none() | st.text(max_size=3) | st.lists(SAMPLES, max_size=2), max_size=3),
    received=st.dictionaries(st.integers(0, 3), SAMPLES, max_size=2),
    tokens=st.dictionaries(
        st.integers(0, 3), st.dictionaries(st.integers(0, 3), TOKENS), max_size=2
    ),
    num_tokens=st.integers(0, 99),
)


def records_of(fields: Sequence[pa.Field]) -> st.SearchStrategy[list[Record]]:
    rows = st.integers(0, NUM_ROWS - 1)
    marks = st.sampled_from([MARK, OTHER_MARK])
    answered = st.builds(Record, rows, marks, answers_of(fields), st.integers(0, 99))
    under_way = st.builds(Record, rows, marks, progress=PROGRESS)
    return st.lists(answered | under_way, max_size=4)


def plain(records: Sequence[Record], fields: Sequence[pa.Field]) -> list[Any]:
    """Return records as values that compare, with answers as the columns that a part would have."""
    found = []
    for record in records:
        answer = record.answer
        columns: dict[str, Any] = {}
        if answer is not None:
            columns["reused"] = answer.reused
            for field in fields:
                column = answer_column([answer.column(field.name)], field.type)
                columns[field.name] = column.to_pylist()
        progress = None if record.progress is None else record.progress.to_json()
        found.append((record.row, record.model_hash, record.num_tokens, columns, progress))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs").resolve()


@pytest.fixture(scope="module")
def storage(folder: Path) -> Storage:
    return Storage((str(folder),))


def write(log: AnswerLog, path: Path, records: Sequence[Record]) -> None:
    with path.open("wb") as sink:
        log.write(sink, records)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_answer_and_progress_comes_back(
    storage: Storage, folder: Path, kind: str
) -> None:
    log = log_of(plan_of(**KINDS[kind]))
    path = folder / "written"

    @settings(max_examples=10)
    @given(records_of(log.fields))
    def comes_back(records: list[Record]) -> None:
        write(log, path, records)
        assert plain(log.read(storage, str(path)), log.fields) == plain(records, log.fields)

    comes_back()


# The format

LOG = log_of(plan_of())
COMPLETION = PlainCompletion(token_ids=[1, 2], text="so", num_prompt_tokens=3)
RECORDS = [
    Record(1, MARK, Answer("one", "stop", 3, 1, 0, None), 1),
    Record(0, OTHER_MARK, Answer("two", "length", 3, 2, 1, None, reused="old#4")),
    Record(2, MARK, progress=Progress([[[COMPLETION]], None], {}, {0: {0: [5]}}, 2)),
]
BESIDE = {
    "_row": pa.int64(),
    "_key": pa.binary(16),
    "_model": pa.binary(16),
    "_source": pa.string(),
    "_tokens": pa.int64(),
    "_under_way": pa.string(),
}


@pytest.fixture
def path(folder: Path) -> Path:
    written = folder / "log"
    write(LOG, written, RECORDS)
    return written


def header_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(pq.read_schema(path).metadata[b"answers"]))


def test_a_log_is_parquet_with_a_header(path: Path) -> None:
    table = pq.read_table(path)
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == {
        **BESIDE,
        **{field.name: field.type for field in LOG.fields},
    }
    run = plan_of().run
    assert header_of(path) == {
        "format": FORMAT,
        "owner": [run, 0, 7, "fingerprint of m", None, "asked"],
        "records": 3,
    }
    rows = [1, 0, 2]
    marks = as_keys(MARK + OTHER_MARK + MARK)
    assert table.select([*BESIDE, "completion"]).to_pydict() == {
        "_row": rows,
        "_key": [key.tobytes() for key in whole_keys(KEYS[rows], marks)],
        "_model": [MARK, OTHER_MARK, MARK],
        "_source": [None, "old#4", None],
        "_tokens": [1, 0, 0],
        "_under_way": [
            None,
            None,
            '{"replies": [[[{"token_ids": "AQAAAAIAAAA=", "text": "so", "num_prompt_tokens": 3}]], null], '
            '"received": [], "tokens": [[0, [[0, "BQAAAA=="]]]], "num_tokens": 2}',
        ],
        "completion": ["one", "two", None],
    }


def reason(storage: Storage, path: Path, log: AnswerLog = LOG) -> str:
    """Return why a log is not read."""
    with pytest.raises(AnswersDamaged) as raised:
        log.read(storage, str(path))
    assert raised.value.argument("path") == str(path)
    return str(raised.value.argument("reason"))


@pytest.mark.parametrize("stride", [41, pytest.param(2, marks=pytest.mark.long)])
def test_damage_at_any_byte_is_noticed_or_harmless(
    storage: Storage, path: Path, stride: int
) -> None:
    content = path.read_bytes()
    expected = plain(RECORDS, LOG.fields)
    num_noticed = 0
    for place in range(0, len(content), stride):
        damaged = bytearray(content)
        damaged[place] ^= (1, 4, 255)[place % 3]
        path.write_bytes(damaged)
        try:
            records = LOG.read(storage, str(path))
        except AnswersDamaged:
            num_noticed += 1
        else:
            assert plain(records, LOG.fields) == expected, place
    assert num_noticed > len(content) // stride // 2


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -100, -9, -1])
def test_a_log_that_was_cut_is_noticed(storage: Storage, path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    assert reason(storage, path)


def test_a_log_that_lacks_records_is_noticed(storage: Storage, path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)
    assert reason(storage, path) == "it has 2 of 3 records"


def test_a_log_that_is_gone_or_none_is_noticed(storage: Storage, folder: Path) -> None:
    assert "InputNotFound" in reason(storage, folder / "gone")
    pq.write_table(pa.table({"_row": [1]}), folder / "none")
    assert "answers" in reason(storage, folder / "none")


@pytest.mark.parametrize("step", [-1, 1])
def test_a_log_of_another_format_is_not_read(storage: Storage, path: Path, step: int) -> None:
    header = json.dumps({**header_of(path), "format": FORMAT + step})
    pq.write_table(pq.read_table(path).replace_schema_metadata({"answers": header}), path)
    assert (
        reason(storage, path) == f"it has format {FORMAT + step}, and this version reads {FORMAT}"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: log_owner(plan, 1, "asked"),
        lambda plan: log_owner(plan, 0, "another check"),
        lambda plan: log_owner(replace(plan, seed=8), 0, "asked"),
        lambda plan: log_owner(replace(plan, model=replace(MODEL, max_model_len=9)), 0, "asked"),
        lambda plan: log_owner(replace(plan, second=MODEL), 0, "asked"),
        lambda plan: log_owner(plan_of(limit=9), 0, "asked"),
    ],
    ids=["shard", "check", "seed", "model", "second model", "run"],
)
def test_a_log_of_another_plan_check_or_model_is_not_read(
    storage: Storage, path: Path, change: Callable[[Plan], list[Any]]
) -> None:
    another = replace(LOG, owner=change(plan_of()))
    assert reason(storage, path, another) == "it is of another plan, check or model"


def test_a_log_with_other_columns_is_not_read(storage: Storage, path: Path) -> None:
    table = pq.read_table(path)
    renamed = table.rename_columns({"completion": "text"})
    pq.write_table(renamed.replace_schema_metadata(table.schema.metadata), path)
    assert "other columns" in reason(storage, path)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_row_that_asks_something_else_now_costs_its_log(
    storage: Storage, path: Path, row: int
) -> None:
    keys = KEYS.copy()
    keys[row, 1] ^= np.uint64(1)
    assert f"its record of row {row} belongs to another row" in reason(
        storage, path, replace(LOG, keys=keys)
    )


@pytest.mark.parametrize("rows", [[1, 0, 9], [1, 0, -1], [1, 0, None], [0, 1, 2]])
def test_records_of_other_rows_are_noticed(
    storage: Storage, path: Path, rows: list[int | None]
) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "_row", pa.array(rows, pa.int64())), path)
    assert "row" in reason(storage, path)


def test_who_only_saves_time_by_a_log_goes_on_without_it(
    storage: Storage, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert plain(LOG.read_if_whole(storage, str(path)), LOG.fields) == plain(RECORDS, LOG.fields)
    assert caplog.text == ""
    path.write_bytes(b"damaged")
    assert LOG.read_if_whole(storage, str(path)) == []
    assert f"{path} is passed over" in caplog.text


def test_a_machine_that_has_run_out_of_something_is_not_passed_over(path: Path) -> None:
    storage = Mock(open_input=Mock(side_effect=OSError(errno.EMFILE, "too many")), shard_bytes=1)
    with pytest.raises(OSError, match="too many"):
        LOG.read_if_whole(storage, str(path))
