"""Whatever a run asks, a later one takes it: chains, labels, embeddings, checks, several completions, batch lines."""

import json
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.context.checks import Checks
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, shout
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs
from tests.jobs.s3_server import S3
from tests.jobs.stored_runs import ROOT, in_store, run_all, spec_of
from tests.jobs.stored_runs import rows as stored_rows

KINDS: dict[str, dict[str, Any]] = {
    "chain": {
        "prompts": [
            {"name": "x", "template": "{prompt}"},
            {"name": "y", "template": "{x} then {id}"},
        ]
    },
    "labels": {"labels": ["yes", "no"], "calibrate": True, "template": "{prompt}"},
    "embeddings": {"task": "embed"},
    "several": {"sampling": {"n": 2, "temperature": 0.5}},
    "check": {"check": {"regex": "[A-Z]+"}},
    "chat": {"template": [{"role": "user", "content": "{prompt}"}]},
}


def answer(request: Request) -> FakeCompletion:
    if request.kind == "score":
        likelihoods = [
            SimpleNamespace(logprob=log(each / 20)) for each in (len(str(request.prompt)), 3)
        ]
        return FakeCompletion(num_prompt_tokens=2, loglikelihoods=likelihoods)
    if request.kind == "embed":
        return FakeCompletion(num_prompt_tokens=3, embedding=[1.5, len(str(request.prompt)), -2])
    return shout(request)


@pytest.fixture
def make_context(make_context: MakeContext, checks: Checks) -> MakeContext:
    return lambda: replace(make_context(), model=replace(MODEL, embedding_size=3), checks=checks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_asking_is_computed_once_and_read_as_it_was(runs: Runs, kind: str) -> None:
    asked: list[Request] = []

    def note(request: Request) -> FakeCompletion:
        asked.append(request)
        return answer(request)

    runs.write(["a", "bb", "ccc", None])
    old = runs.score(answer=answer, **KINDS[kind])
    new = runs.score(
        output=runs.output.parent / "new", answer=note, reuse=[str(runs.output)], **KINDS[kind]
    )
    assert asked == []
    assert new.equals(old)


def test_lines_of_batch_files_keep_their_new_names(runs: Runs) -> None:
    def line(name: str, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}]}
        return json.dumps(
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        )

    source = runs.source.with_suffix(".jsonl")
    source.write_text(f"{line('one', 'a')}\n{line('two', 'b')}\n")
    runs.plan(source, input_format="openai-batch")
    runs.work()
    source.write_text(f"{line('zwei', 'b')}\n{line('three', 'c')}\n")
    asked: list[str] = []
    new = runs.output.parent / "new"
    runs.plan(source, new, input_format="openai-batch", reuse=[str(runs.output)])

    def note(request: Request) -> FakeCompletion:
        assert request.messages is not None
        asked.append(request.messages[0]["content"])
        return shout(request)

    runs.work(note)
    assert asked == ["c"]
    found = [json.loads(text) for text in (new / "output.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["zwei", "three"]
    assert "'B'" in found[0]["response"]["body"]["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "options", [{"single_file": "csv"}, {"single_file": "parquet", "output_prefix": "p_"}]
)
def test_outputs_of_one_file_are_reused_too(runs: Runs, options: dict[str, Any]) -> None:
    runs.write(["a", "b"])
    runs.plan(**options)
    runs.work()
    new = runs.score(
        output=runs.output.parent / "new", answer=pytest.fail, reuse=[str(runs.output)]
    )
    assert new.column("completion").to_pylist() == ["A", "B"]


def test_a_function_that_checks_otherwise_now_asks_again(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    runs.write(["a", "b"])
    asked: list[Request] = []

    def note(request: Request) -> FakeCompletion:
        asked.append(request)
        return shout(request)

    def run_with(source: str, planned_with: str = "", **options: Any) -> list[Request]:
        asked.clear()
        make = runs.context
        for text, does in (
            (planned_with or source, runs.plan),
            (source, lambda **_: runs.work(note)),
        ):
            (tmp_path / "own_check.py").write_text(text)
            checks = Checks({"own_check.check"})
            with monkeypatch.context() as patched:
                patched.setattr(
                    runs, "context", partial(lambda own: replace(make(), checks=own), checks)
                )
                does(check={"function": "own_check.check"}, **options)
            checks.close()
        return list(asked)

    first = "def check(row, completion):\n    return None\n"
    assert len(run_with(first)) == 2
    assert run_with(first, output=tmp_path / "same", reuse=[str(runs.output)]) == []
    changed = run_with("LIMIT = 3\n" + first, output=tmp_path / "beside", reuse=[str(runs.output)])
    assert len(changed) == 2, "what else its file has may be what it reads"
    other = first.replace("return None", "return None if completion else 'empty'")
    assert len(run_with(other, output=tmp_path / "other", reuse=[str(runs.output)])) == 2
    assert len(run_with(other, first, output=tmp_path / "late", reuse=[str(runs.output)])) == 2


@pytest.mark.parametrize("places", ["disk to store", "store to disk", "store to store"])
def test_runs_in_stores_are_reused_from_and_into(
    s3: S3, tmp_path: Path, make_context: MakeContext, places: str
) -> None:
    context = in_store(make_context(), tmp_path)
    source = tmp_path / "in.parquet"
    pq.write_table(stored_rows(5), source)
    old = str(tmp_path / "old") if places.startswith("disk") else f"{ROOT}/old"
    new = str(tmp_path / "new") if places.endswith("disk") else f"{ROOT}/new"
    run_all(context, spec_of(str(source), old))
    pq.write_table(stored_rows(7).slice(2), source)
    done = run_all(context, spec_of(str(source), new), reuse=(old,))
    assert done["run_finished"]
    if places.endswith("disk"):
        rows, manifest = (
            pq.read_table(new).to_pylist(),
            (tmp_path / "new" / "_manifest.json").read_text(),
        )
    else:
        rows, manifest = s3.rows("data/new"), s3.get("data/new/_manifest.json").decode()
    assert [row["completion"] for row in rows] == [f"P{n}" for n in range(2, 7)]
    assert json.loads(manifest)["rows_reused"] == 3
    assert not [name for name in s3.names() if "_reused" in name or "_tmp" in name]
