"""Labels of a run's rows: a column for each part of what was found, in any order of answers."""

import json
import random
from collections.abc import Callable, Sequence
from itertools import chain
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jobs.context.answers import Answer, AnswerMemo
from jobs.context.checks import Checks
from jobs.errors import ColumnConflict, InvalidJob
from jobs.items.runner import ItemRunner
from jobs.parquet.asks.row_keys import row_keys
from jobs.parquet.asks.scores import Scores
from jobs.parquet.files.storage import Storage
from jobs.parquet.prompts.prompt_source import Row
from jobs.parquet.reuse.answer_log import AnswerLog, Record
from jobs.parquet.shards.row_items import row_runner
from jobs.parquet.tables.columns import RowProblem
from jobs.prompts.scoring.labels import Labels
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import FakeCompletion, keyed, refuse
from tests.jobs.local_runs import Runs
from tests.jobs.parquet.conftest import Ask

Score = Callable[..., pa.Table]
LABELS = ["yes", "no", "may, be"]
ADDED = ["label", "probability", "probabilities", "margin"]
CHAIN = [
    {"name": "short", "template": "{text} In short:"},
    {"name": "asked", "template": "{text} {short}? "},
]
TOKENS = ["prompt_tokens", "completion_tokens", "cached_tokens", "error"]


def asked(request: Request) -> str:
    return request.prompt if isinstance(request.prompt, str) else request.messages[-1]["content"]


def weights(text: str) -> list[float]:
    """How likely each label is behind a text."""
    rng = random.Random(text)
    return [rng.uniform(0.1, 1) for _ in LABELS]


def likely(request: Request) -> FakeCompletion:
    assert request.kind == "score"
    assert request.sampling["continuations"] == LABELS
    if "broken" in asked(request):
        return refuse("it is broken")
    likelihoods = [SimpleNamespace(logprob=log(weight)) for weight in weights(asked(request))]
    return FakeCompletion(num_prompt_tokens=7, num_cached_tokens=3, loglikelihoods=likelihoods)


def expected(text: str, prior: str | None = None) -> list[float]:
    found = weights(text)
    if prior is not None:
        found = [own / before for own, before in zip(found, weights(prior), strict=True)]
    return [each / sum(found) for each in found]


@pytest.fixture
def score(runs: Runs, tmp_path: Path) -> Score:
    """Runs a file to its end and returns the output."""

    def run(out: str = "out", **arguments: Any) -> pa.Table:
        arguments = {"template": "{text}: ", "labels": LABELS, **arguments}
        runs.plan(output=tmp_path / out, **arguments)
        runs.work(answer=likely)
        assert (tmp_path / out / "_SUCCESS").exists()
        return None if "single_file" in arguments else pq.read_table(tmp_path / out)

    return run


def write(folder: Path, texts: Sequence[str | None]) -> None:
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "in.parquet")


def check(row: dict[str, Any], probabilities: Sequence[float]) -> None:
    found = dict(row["probabilities"])
    assert list(found) == LABELS
    assert list(found.values()) == pytest.approx(probabilities)
    first, second = sorted(probabilities, reverse=True)[:2]
    assert row["label"] == LABELS[probabilities.index(first)]
    assert (row["probability"], row["margin"]) == (
        pytest.approx(first),
        pytest.approx(first - second),
    )
    assert [row[name] for name in TOKENS] == [7, 0, 3, None]


@pytest.mark.parametrize("calibrate", [False, True])
def test_each_row_has_the_probabilities_of_the_labels(
    score: Score, tmp_path: Path, calibrate: bool
) -> None:
    write(tmp_path, ["a", None, "ü", "a", "broken", ""])
    table = score(calibrate=calibrate, rows_per_shard=4)
    assert table.column_names == ["id", "text", *ADDED, *TOKENS]
    assert table.schema.field("probabilities").type == pa.map_(pa.string(), pa.float64())
    rows = table.to_pylist()
    for number in (0, 2, 3, 5):
        check(rows[number], expected(f"{rows[number]['text']}: ", "N/A: " if calibrate else None))
    assert rows[1]["error"] == "column 'text' is null"
    assert rows[4]["error"] == "it is broken"
    assert [[row[name] for name in ADDED] for row in (rows[1], rows[4])] == [[None] * 4] * 2


STRUCT = pa.struct([(label, pa.float64()) for label in LABELS])


def test_probabilities_are_a_struct_on_wish(score: Score, runs: Runs, tmp_path: Path) -> None:
    write(tmp_path, ["a", None, "b"])
    table = score(probabilities="struct")
    assert table.schema.field("probabilities").type == STRUCT
    rows = table.to_pylist()
    check(rows[0], expected("a: "))
    assert rows[1]["probabilities"] is None
    again = score("again", probabilities="struct", reuse=str(tmp_path / "out"))
    assert again["probabilities"].to_pylist() == table["probabilities"].to_pylist()
    manifest = json.loads((tmp_path / "again" / "_manifest.json").read_text())
    assert manifest["rows_reused"] == 2
    score("csv", probabilities="struct", single_file="csv")
    first, *_ = pyarrow.csv.read_csv(tmp_path / "csv" / "output.csv").to_pylist()
    assert json.loads(first["probabilities"]) == pytest.approx(rows[0]["probabilities"])


def test_a_chain_has_a_struct_too(runs: Runs, tmp_path: Path) -> None:
    write(tmp_path, ["a"])

    def answer(request: Request) -> FakeCompletion:
        return likely(request) if request.kind == "score" else FakeCompletion("x", 0, [1])

    table = runs.score(answer=answer, prompts=CHAIN, labels=LABELS, probabilities="struct")
    assert table.schema.field("probabilities").type == STRUCT
    assert sum(table["probabilities"][0].as_py().values()) == pytest.approx(1)


def test_journals_keep_structs(tmp_path: Path) -> None:
    spec = RunSpec.from_arguments("in", "out", labels=LABELS, probabilities="struct")
    pairs = tuple(zip(LABELS, (0.5, 0.25, 0.25), strict=True))
    columns = {"label": "yes", "probability": 0.5, "probabilities": pairs, "margin": 0.25}
    answer = Answer(None, "stop", 7, 0, 3, None, columns=columns)
    log = AnswerLog(["owner"], np.ones((1, 2), np.uint64), Scores.fields(spec, 0))
    path = tmp_path / "log"
    with path.open("wb") as sink:
        log.write(sink, [Record(0, bytes(16), answer)])
    (record,) = log.read(Storage((str(tmp_path),)), str(path))
    assert record.answer is not None
    assert record.answer.column("probabilities") == dict(pairs)


def requests_of(
    texts: Sequence[str | RowProblem], prior: str | None, memo: AnswerMemo
) -> ItemRunner[Answer]:
    spec = RunSpec.from_arguments("in", "out", labels=LABELS)
    labels = keyed(Scores(Labels.of(LABELS), prior=None if prior is None else Row(prior)), spec)
    rows = [Row(text) if isinstance(text, str) else text for text in texts]
    memo_keys = row_keys(labels.key_of, rows)
    return row_runner(rows, labels, Checks(), lambda row: row, memo=memo, memo_keys=memo_keys)


@pytest.mark.parametrize("prior", [None, "N/A"])
def test_equal_rows_are_asked_once_and_the_order_of_answers_changes_nothing(
    prior: str | None,
) -> None:
    texts = [f"text {number % 4}" for number in range(10)]
    memo = AnswerMemo()
    for seed in range(3):
        requests = requests_of([*texts, RowProblem("none"), "broken"], prior, AnswerMemo())
        sent = list(requests.requests())
        if prior is not None:  # what came of it decides all others
            assert (list(map(asked, sent)), requests.has_more) == ([prior], False)
            requests.deliver(0, [likely(sent[0])])
            assert requests.has_more
            sent += requests.requests()
        assert sorted(map(asked, sent)) == sorted({*texts, "broken", *([prior] if prior else [])})
        order = list(range(prior is not None, len(sent)))
        random.Random(seed).shuffle(order)
        for index in order:
            requests.deliver(index, [likely(sent[index])])
        answers = requests.answers()
        for text, answer in zip(texts, answers, strict=False):
            found = dict(answer.column("probabilities"))
            assert list(found.values()) == pytest.approx(expected(text, prior))
        assert [answers[-2].error, answers[-1].error] == ["none", "it is broken"]
        assert (requests.counts.done, requests.counts.generated_tokens) == (12, 0)
    first, second = requests_of(texts, prior, memo), requests_of(texts, prior, memo)
    for index, request in enumerate(chain(first.requests(), first.requests())):
        first.deliver(index, [likely(request)])
    assert len(list(second.requests())) == (1 if prior else 0), (
        "another shard has had all rows' answers"
    )


def test_a_chat_is_calibrated_with_a_chat_and_both_have_the_options_of_its_template(
    runs: Runs, tmp_path: Path
) -> None:
    write(tmp_path, ["a"])
    seen: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        return likely(request)

    template = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "{text}?"}]
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    table = runs.score(
        answer=answer, template=template, labels=LABELS, calibrate=True, sampling=own
    )
    check(table.to_pylist()[0], expected("a?", "N/A?"))
    assert [request.chat_options for request in seen] == [own, own], (
        "the prompt without content too"
    )


def test_the_last_of_several_prompts_is_scored(score: Score, runs: Runs, tmp_path: Path) -> None:
    write(tmp_path, ["a", None, "broken", "a"])
    seen: list[Request] = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        if request.kind == "score":
            return likely(request)
        return FakeCompletion(f"<{request.prompt}>", 0, [1, 2], "stop", 10, 1)

    table = runs.score(
        answer=answer, prompts=CHAIN, labels=LABELS, sampling={"max_tokens": 9, "temperature": 0}
    )
    assert table.column_names == ["id", "text", "short", "short_finish_reason", *ADDED, *TOKENS]
    assert table.schema.field("probabilities").type == pa.map_(pa.string(), pa.float64())
    rows = table.to_pylist()
    text = "a <a In short:>? "
    check({**rows[0], **dict(zip(TOKENS, (7, 0, 3, None), strict=True))}, expected(text))
    assert ([rows[0][name] for name in TOKENS], rows[0]["short"]) == (
        [17, 2, 4, None],
        "<a In short:>",
    )
    assert rows[3] == {**rows[0], "id": 3}
    assert [row["error"] for row in rows[1:3]] == [
        "prompt 'short': column 'text' is null",
        "prompt 'asked': it is broken",
    ]
    assert [[row[name] for name in ADDED] for row in rows[1:3]] == [[None] * 4] * 2
    assert rows[2]["short"] == "<broken In short:>"
    assert [request.sampling.get("max_tokens") for request in seen] == [9, 9, None, None], (
        "equal rows are asked once"
    )


def test_a_chain_has_the_labels_of_the_text_that_it_renders(
    runs: Runs, ask: Ask, compute: Callable[[], None], tmp_path: Path
) -> None:
    write(tmp_path, ["The quick brown", "Numbers: 0 1", "ü"])
    runs.plan(
        prompts=CHAIN, labels=LABELS, sampling={"temperature": 0.8, "seed": 2, "max_tokens": 6}
    )
    compute()
    for row in runs.rows():
        found = ask("jobs.classify", f"{row['text']} {row['short']}? ", LABELS)
        assert row["label"] == found["label"]
        assert dict(row["probabilities"]) == pytest.approx(found["probabilities"], abs=1e-5)
        assert row["short_finish_reason"] == "length"


def test_columns_are_chosen_named_and_written_as_json(score: Score, tmp_path: Path) -> None:
    write(tmp_path, ["a", None])
    table = score(keep=["id"], output_prefix="x_", limit=1)
    assert table.column_names == ["id", *("x_" + name for name in (*ADDED, *TOKENS))]
    score("json", single_file="jsonl")
    lines = [
        json.loads(line) for line in (tmp_path / "json" / "output.jsonl").read_text().splitlines()
    ]
    assert lines[0]["probabilities"] == pytest.approx(
        dict(zip(LABELS, expected("a: "), strict=True))
    )
    assert lines[1]["probabilities"] is None
    pq.write_table(pa.table({"text": ["a"], "label": ["b"]}), tmp_path / "in.parquet")
    with pytest.raises(ColumnConflict, match="label"):
        score("clash")


FORCED = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


def test_a_call_is_forced_of_the_prompts_before_labels(tmp_path: Path) -> None:
    chats = [
        {**each, "template": [{"role": "user", "content": each["template"]}]} for each in CHAIN
    ]
    spec = RunSpec.from_arguments(
        "in", str(tmp_path), labels=LABELS, prompts=chats, sampling=FORCED
    )
    first, last = spec.steps
    assert first.sampling["tool_choice"] == "required"
    assert "tool_choice" not in last.sampling
    assert first.chat == last.chat == {"tools": FORCED["tools"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ["a"]}, "labels holds 1"),
        ({"labels": ["a", "a"]}, "are both 'a'"),
        ({"labels": ["a", "b"], "sampling": {"max_tokens": 4}}, "nothing is generated"),
        (
            {"labels": ["a", "b"], "messages_column": "chat", "sampling": FORCED},
            "'tool_choice', and for labels",
        ),
        ({"calibrate": True}, "calibrate is for labels"),
        (
            {"labels": LABELS, "prompts": CHAIN, "calibrate": True},
            "calibrate and prompts do not go together",
        ),
        (
            {"labels": LABELS, "prompts": [{**CHAIN[1], "sampling": {"top_p": 1}}, CHAIN[0]]},
            "names 'short', which",
        ),
        (
            {"labels": LABELS, "prompts": [CHAIN[0], {**CHAIN[1], "sampling": {"top_p": 1}}]},
            "prompt 'asked' has 'top_p'",
        ),
        (
            {"labels": LABELS, "prompts": [{**CHAIN[0], "name": "label"}, CHAIN[0]]},
            "'label', which is there already",
        ),
        ({"labels": LABELS, "prompts": CHAIN, "sampling": {"n": 2}}, "n must be 1"),
        ({"task": "classify", "probabilities": "struct"}, "name labels too"),
        ({"labels": LABELS, "prompts": CHAIN, "check": {"regex": "a"}}, "check and labels"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        RunSpec.from_arguments("in", str(tmp_path), **arguments)
