"""Log probabilities of a run's rows: those of transformers' logits, as columns that others read."""

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from jobs.client import run_arguments
from jobs.context.answers import ENTRY_BYTES, AnswerMemo
from jobs.errors import InvalidJob
from jobs.items.records import PlainLogprob
from jobs.parquet.asks import generate
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.engine.reference import Reference
from tests.jobs.answering import FakeCompletion, refuse, run_task, shard_of
from tests.jobs.conftest import Invoke
from tests.jobs.local_runs import Runs
from tests.jobs.parquet.conftest import Ask

CLOSE = 1e-4
TEXTS = ["The quick brown", "Numbers: 0 1", None, "ü", "The quick brown"]
GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
BOTH = {"logprobs": 3, "prompt_logprobs": 2}
ENTRY = [
    ("token_id", pa.int32()),
    ("token", pa.string()),
    ("logprob", pa.float32()),
    ("rank", pa.int32()),
]
KIND = pa.list_(pa.list_(pa.struct(ENTRY)))

Score = Callable[..., pa.Table]


@pytest.fixture
def score(runs: Runs, compute: Callable[[], None], tmp_path: Path) -> Score:
    """Runs a file to its end and returns the output."""
    pq.write_table(pa.table({"id": range(len(TEXTS)), "prompt": TEXTS}), runs.source)

    def run(out: str = "out", sampling: Any = None, **arguments: Any) -> pa.Table:
        runs.plan(
            output=tmp_path / out,
            sampling={**GREEDY, **BOTH} if sampling is None else sampling,
            **arguments,
        )
        compute()
        assert (tmp_path / out / "_SUCCESS").exists()
        return None if "single_file" in arguments else pq.read_table(tmp_path / out)

    return run


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Callable[[list[int]], torch.Tensor]:
    model = Reference(checkpoint).model

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] of what follows each token."""
        with torch.inference_mode():
            return (
                model(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)
            )

    return logprobs


def whole_characters(text: str) -> str:
    """Return a text without what stands for parts of characters, in tokens and in completions."""
    return re.sub(r"bytes:(\\x[0-9a-f]{2})+|\ufffd", "", text)


def check_position(
    entries: list[dict[str, Any]], token_id: int, known: torch.Tensor, most: int, tokenizer: Any
) -> None:
    """The token that stands there comes first, then the others by rank."""
    assert entries[0]["token_id"] == token_id
    others = [each["rank"] for each in entries[1:]]
    assert others == [rank for rank in range(1, most + 1) if rank != entries[0]["rank"]]
    for each in entries:
        assert each["logprob"] == pytest.approx(known[each["token_id"]].item(), abs=CLOSE)
        assert each["rank"] == pytest.approx(
            1 + int((known > known[each["token_id"]] + CLOSE).sum()), abs=1
        )
        if not each["token"].startswith("bytes:"):  # a part of a character
            assert each["token"] == tokenizer.decode([each["token_id"]])


def test_columns_have_what_a_job_has_and_transformers_give(
    score: Score, ask: Ask, truth: Callable[[list[int]], torch.Tensor], tokenizer: Any
) -> None:
    table = score()
    added = [
        "completion",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "error",
    ]
    assert table.column_names == ["id", "prompt", *added, "logprobs", "prompt_logprobs"]
    assert table.schema.field("logprobs").type == table.schema.field("prompt_logprobs").type == KIND
    rows = table.to_pylist()
    assert rows[2]["logprobs"] is rows[2]["prompt_logprobs"] is None
    assert rows[2]["error"] is not None
    for row in (rows[0], rows[1], rows[3]):
        prompt = tokenizer.encode(row["prompt"])
        tokens = [entries[0]["token_id"] for entries in row["logprobs"]]
        known = truth([*prompt, *tokens])
        assert (len(tokens), row["prompt_logprobs"][0]) == (5, None)
        for place, entries in enumerate(row["prompt_logprobs"][1:]):
            check_position(entries, prompt[place + 1], known[place], 2, tokenizer)
        for place, entries in enumerate(row["logprobs"], len(prompt) - 1):
            check_position(entries, tokens[place - len(prompt) + 1], known[place], 3, tokenizer)
        (choice,) = ask("jobs.complete", row["prompt"], **GREEDY, **BOTH)["choices"]
        found = choice["logprobs"]
        assert [entries[0]["token"] for entries in row["logprobs"]] == found["tokens"]
        given = [entries[0]["logprob"] for entries in row["logprobs"]]
        assert given == pytest.approx(found["token_logprobs"], abs=CLOSE)
        for entries, by_id in zip(
            row["prompt_logprobs"][1:], choice["prompt_logprobs"][1:], strict=True
        ):
            assert [str(each["token_id"]) for each in entries] == list(by_id), "in the same order"
            assert [each["rank"] for each in entries] == [each["rank"] for each in by_id.values()]
    assert rows[4]["logprobs"] == rows[0]["logprobs"]


def test_pandas_reads_them_also_where_float16_makes_them_smaller(
    score: Score, tmp_path: Path
) -> None:
    exact = score("exact")["logprobs"].to_pylist()
    table = score(sampling={**GREEDY, "logprobs": 0}, output_prefix="x_", logprob_type="float16")
    assert pa.types.is_float16(
        table.schema.field("x_logprobs").type.value_type.value_type.field("logprob").type
    )
    frame = pandas.read_parquet(tmp_path / "out")
    assert "x_prompt_logprobs" not in frame.columns
    entries = frame["x_logprobs"].iloc[0]
    assert [len(each) for each in entries] == [1] * 5, "of 0 likeliest ones the token alone"
    assert entries[0][0].keys() == {"token_id", "token", "logprob", "rank"}
    assert frame["x_logprobs"].iloc[2] is None
    assert [each[0]["logprob"] for each in entries] == [
        float(np.float16(each[0]["logprob"])) for each in exact[0]
    ]


def test_each_of_several_completions_has_its_own(score: Score) -> None:
    table = score(sampling={**BOTH, "max_tokens": 4, "ignore_eos": True, "n": 2, "seed": 1})
    assert table.schema.field("logprobs").type == pa.list_(KIND)
    assert table.schema.field("prompt_logprobs").type == KIND
    rows = table.to_pylist()
    for row in (rows[0], rows[3]):
        assert [len(each) for each in row["logprobs"]] == row["completion_tokens"] == [4, 4]
        texts = ["".join(entries[0]["token"] for entries in each) for each in row["logprobs"]]
        assert [whole_characters(text) for text in texts] == [
            whole_characters(text) for text in row["completion"]
        ]
    assert rows[2]["logprobs"] is None


def test_files_of_text_have_them_as_json_however_many(
    score: Score, tmp_path: Path, monkeypatch: Any
) -> None:
    rows = score().to_pylist()
    monkeypatch.setattr("jobs.parquet.tables.columns.MAX_NESTED_VALUES", 10)
    score("json", single_file="jsonl")
    lines = [
        json.loads(line) for line in (tmp_path / "json" / "output.jsonl").read_text().splitlines()
    ]
    assert [each["logprobs"] for each in lines] == [row["logprobs"] for row in rows]
    score("csv", single_file="csv", logprob_type="float16")
    csv.field_size_limit(sys.maxsize)
    with (tmp_path / "csv" / "output.csv").open(newline="") as file:
        fields = [each["prompt_logprobs"] for each in csv.DictReader(file)]
    assert fields[2] == ""
    assert [each["token"] for each in json.loads(fields[0])[1]] == [
        each["token"] for each in rows[0]["prompt_logprobs"][1]
    ]
    score("arrow", single_file="arrow")
    with pa.ipc.open_file(tmp_path / "arrow" / "output.arrow") as file:
        assert file.read_all()["logprobs"].to_pylist() == [row["logprobs"] for row in rows]


def test_each_prompt_of_a_chain_has_its_own(score: Score, tokenizer: Any) -> None:
    asks = {"logprobs": 1, "max_tokens": 3}
    prompts = [
        {"name": "a", "template": "{prompt}", "sampling": asks},
        {"name": "b", "template": "{prompt}{a}", "sampling": {"prompt_logprobs": 0}},
    ]
    table = score(sampling=GREEDY, prompts=prompts)
    own = ["a", "a_finish_reason", "a_logprobs", "b", "b_finish_reason", "b_prompt_logprobs"]
    assert table.column_names[2:8] == own
    rows = table.to_pylist()
    assert [row["a_logprobs"] is None for row in rows] == [
        row["b_prompt_logprobs"] is None for row in rows
    ]
    assert len(rows[1]["a_logprobs"]) == 3
    prompt = [each[0]["token_id"] for each in rows[1]["b_prompt_logprobs"][1:]]
    assert prompt == tokenizer.encode(rows[1]["prompt"] + rows[1]["a"])[1:]
    with pytest.raises(InvalidJob, match="'a_logprobs', which is there already"):
        RunSpec.from_arguments(
            "in", "out", prompts=[prompts[0], {"name": "a_logprobs", "template": "{a}"}]
        )


def test_a_resumed_run_and_its_failed_rows_have_the_same(
    score: Score, runs: Runs, tmp_path: Path
) -> None:
    whole = score("whole", sampling={**BOTH, "seed": 3, "max_tokens": 4}, rows_per_shard=2)
    arguments: dict[str, Any] = {
        "sampling": {**BOTH, "seed": 3, "max_tokens": 4},
        "rows_per_shard": 2,
    }
    score("out", **arguments)
    part, *_ = sorted((tmp_path / "out").glob("part-*"))
    (tmp_path / "out" / "_SUCCESS").unlink()
    part.unlink()
    assert score("out", **arguments).equals(whole)


def logprobs_of(request: Request) -> FakeCompletion:
    """An answer of a hundred tokens, with ten entries each."""
    rows = [{n: PlainLogprob(-1.5, n, "tok") for n in range(10)}] * 100
    found = FakeCompletion("text", token_ids=[1] * 100, num_prompt_tokens=2, logprobs=rows)
    return refuse("it is broken") if request.prompt == "broken" else found


def test_equal_rows_share_one_value_that_the_memo_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    memo, sampling = AnswerMemo(), {"temperature": 0, "logprobs": 9}
    first = shard_of("aab", sampling, memo=memo)
    for index, request in enumerate(list(first.requests())):
        first.deliver(index, [logprobs_of(request)])
    one, two, _ = first.answers()
    assert one is two
    num_bytes = one.columns["logprobs"].nbytes
    assert 100 * 10 * 15 <= num_bytes <= 100 * 10 * 20
    assert 2 * num_bytes < memo.num_bytes < 2 * (num_bytes + ENTRY_BYTES + 400)
    again = shard_of("ab", sampling, memo=memo)
    assert list(again.requests()) == []
    assert again.answers()[0].columns["logprobs"] is one.columns["logprobs"]
    monkeypatch.setattr(generate, "MAX_LOGPROB_BYTES", 3 * num_bytes // 2)
    third = shard_of("ab", sampling)
    for index, request in enumerate(third.requests()):
        if index:
            with pytest.raises(InvalidJob, match="smaller rows_per_shard"):
                third.deliver(index, [logprobs_of(request)])
        else:
            third.deliver(index, [logprobs_of(request)])


def test_they_are_neither_compared_nor_shown(runs: Runs, invoke: Invoke) -> None:
    runs.write(["a", "broken", None])
    runs.score(answer=logprobs_of, sampling={"temperature": 0, "logprobs": 9})
    assert [row["logprobs"] is None for row in runs.rows()] == [False, True, True]
    plan = runs.output / "_plan.json"
    found = run_task(
        runs.context(),
        "jobs.verify_rows",
        json.loads(plan.read_text())["run"],
        str(plan),
        "100%",
        answer=logprobs_of,
    )
    assert (
        found["rows_equal"],
        "completion" in found["columns"],
        "logprobs" in found["columns"],
    ) == (1, True, False)
    shown = invoke("tail", runs.output)
    assert ("tok" in shown.output, "text" in shown.output) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": {"logprobs": 21}}, "logprobs is 21, expected a number of tokens, 0 to 20"),
        ({"sampling": {"prompt_logprobs": -1}}, "prompt_logprobs is -1, expected"),
        (
            {"sampling": {"logprobs": True, "top_logprobs": 2}},
            "logprobs is True, expected a number",
        ),
        ({"sampling": {"echo": True}}, "echo is not built for a run"),
        ({"sampling_columns": {"logprobs": "n"}}, "logprobs cannot come from a column"),
        ({"logprob_type": "float16"}, "logprob_type is for log probabilities"),
        ({"logprob_type": "int8", "sampling": {"logprobs": 1}}, "logprob_type is 'int8', expected"),
        ({"labels": ["a", "b"], "sampling": {"logprobs": 1}}, "nothing is generated"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        RunSpec.from_arguments("in", "out", **arguments)


def test_the_type_is_no_part_of_a_run_where_it_is_the_default() -> None:
    asked = {"sampling": {"logprobs": 2}}
    plain = RunSpec.from_arguments("in", "out", **asked)
    assert RunSpec.from_arguments("in", "out", **asked, logprob_type="float32").run == plain.run
    assert RunSpec.from_arguments("in", "out", **asked, logprob_type="float16").run != plain.run
    assert "logprob_type" not in plain.to_json()
    assert run_arguments(asked["sampling"]) == asked
