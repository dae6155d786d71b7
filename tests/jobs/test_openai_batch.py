"""OpenAI's batch files in and out: what its own client's types read, one line's fault costing that line."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from redis import Redis

from jobs.context import JobContext
from jobs.errors import CorruptTable, InvalidJob
from jobs.installed import check_sampling
from jobs.parquet.formats import line_scan
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import (
    FakeCompletion,
    opened_task,
    queued_jobs,
    refuse,
    score_parquet,
    shout,
    work_off,
)
from tests.jobs.conftest import Invoke
from tests.jobs.killing import Fuse
from tests.jobs.test_kills import recover, release_lock, run_until_killed

MakeContext = Callable[[], JobContext]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


def chat(name: str, text: Any = "hi", **values: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **values}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def complete(name: str, prompt: Any = "hi", **values: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": TEXT, "body": {"prompt": prompt, **values}}


def embed(name: str, text: Any = "hi", **values: Any) -> dict[str, Any]:
    body = {"model": "m", "input": text, **values}
    return {"custom_id": name, "method": "POST", "url": EMBEDDINGS, "body": body}


def write(path: Path, lines: list[Any]) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def score(context: JobContext, source: str, tmp_path: Path, **options: Any) -> dict[str, Any]:
    options = {"input_format": "openai-batch", "rows_per_shard": 2, **options}
    return score_parquet(context, source, str(tmp_path / "out"), **options)


def read(tmp_path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of the output file and of the error file."""
    files = [(tmp_path / "out" / name).read_text() for name in ("output.jsonl", "errors.jsonl")]
    output, errors = ([json.loads(line) for line in text.splitlines()] for text in files)
    for line in (*output, *errors):
        assert line.keys() == {"id", "custom_id", "response", "error"}
    return output, errors


def test_openais_types_read_what_its_lines_get(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [
        chat("c-1", "hello", model="m", temperature=0, max_completion_tokens=5, stream=False, user="u"),
        complete("t-1", "a text", max_tokens=3),
        complete("t-2", ["one", "two"], n=1, seed=7),
        complete("t-3", [1, 2, 3]),
        chat("ünï/ 4", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ]
    planned = score(make_context(), write(tmp_path / "requests.jsonl", lines), tmp_path)
    assert (planned["rows"], planned["shards"]) == (5, 3)
    assert not (tmp_path / "out" / "output.jsonl").exists()
    work_off(redis, make_context)
    output, errors = read(tmp_path)
    assert errors == []
    assert [line["custom_id"] for line in output] == ["c-1", "t-1", "t-2", "t-3", "ünï/ 4"]
    assert len({line["id"] for line in output}) == 5
    for line in output:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["request_id"]
        body = line["response"]["body"]
        kind = ChatCompletion if body["object"] == "chat.completion" else Completion
        kind.model_validate(body, strict=True)
    bodies = [line["response"]["body"] for line in output]
    assert bodies[0]["choices"][0]["message"]["content"].startswith("[{'ROLE'")
    assert [choice["text"] for choice in bodies[2]["choices"]] == ["ONE", "TWO"]
    assert len({body["id"] for body in bodies}) == 5


def test_each_line_has_values_of_its_own_and_a_seed_that_stays(
    make_context: MakeContext, redis: Redis, tmp_path: Path
) -> None:
    lines = [complete("a", "p", temperature=0.5), complete("b", "p", seed=3), complete("c", "p", seed=None)]
    score(make_context(), write(tmp_path / "in.jsonl", lines), tmp_path, sampling={"seed": 1})

    def requests() -> list[Request]:
        opened = [opened_task(make_context(), job.func_name, job.args) for job in queued_jobs(redis)]
        found = [request for task in opened for request in task.requests()]
        for task in opened:
            task.close()
        return found

    first = requests()
    assert first == requests()
    seeds = [request.sampling["seed"] for request in first]
    assert seeds[1] == 3
    assert len(set(seeds)) == 3
    assert first[0].sampling["temperature"] == 0.5


def test_lines_of_embeddings_are_what_openais_types_read(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [embed("a", "x"), complete("b", "p"), embed("c", [[5, 6], "yz"], encoding_format="base64")]
    score(make_context(), write(tmp_path / "in.jsonl", lines), tmp_path)
    numbers = [0.5, -1.25]

    def answer(request: Request) -> FakeCompletion:
        return replace(shout(request), embedding=numbers if request.kind == "embed" else None)

    work_off(redis, make_context, answer=answer)
    found = [json.loads(line) for line in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    bodies = {line["custom_id"]: line["response"]["body"] for line in found}
    read = CreateEmbeddingResponse.model_validate(bodies["a"], strict=True)
    assert read.data[0].embedding == numbers
    assert read.usage.total_tokens == 1
    assert [each["embedding"] for each in bodies["c"]["data"]] == ["AAAAPwAAoL8="] * 2
    assert bodies["b"]["object"] == "text_completion"


def test_a_bad_line_costs_that_line_and_says_why(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    bad: list[tuple[Any, str]] = [
        ("{no json", "line 2 is not JSON"),
        ("[1]", "line 3 is JSON, but no object"),
        (complete("ok"), "an earlier line has this custom_id"),
        ({**complete("x"), "custom_id": 5}, "custom_id is 5, expected a text"),
        ({**complete("x2"), "method": "GET"}, "method is 'GET', expected 'POST'"),
        ({**complete("x3"), "url": "/v1/moderations"}, "url is '/v1/moderations', which is not built"),
        (embed("x16", ["fine", "refused by the engine"]), "input 1: too long for me"),
        (embed("x17", None), "input is missing"),
        (embed("x18", "a", max_tokens=3), "'max_tokens' is no argument of jobs.embed"),
        ({**complete("x4"), "url": None}, "url is None"),
        ({**complete("x5"), "body": '{"prompt": "a"}'}, "body is "),
        ({"custom_id": "x6", "method": "POST", "url": CHAT, "body": {}}, "body has no 'messages'"),
        (complete("x7", model="gpt-4o"), "asks for model 'gpt-4o', and this worker serves 'm'"),
        (complete("x8", max_tokens="5"), "max_tokens arrived as the text"),
        (complete("x9", temperature=-1), "temperature"),
        (complete("x10", unheard_of=1), "unheard_of"),
        (complete("x11", stream=True), "stream"),
        (complete("x12", [""] * 20_000), "20000 prompts"),
        (chat("x13", [{"type": "image_url"}]), "image_url"),
        (complete("x14", "refused by the engine"), "too long for me"),
        (complete("x15", ["fine", "refused by the engine"]), "choice 1: too long for me"),
    ]  # fmt: skip

    def answer(request: Request) -> FakeCompletion:
        refused = request.prompt == "refused by the engine"
        return refuse("too long for me") if refused else shout(request)

    lines = [complete("ok"), *(line for line, _ in bad), complete("last")]

    def checked() -> JobContext:
        return replace(make_context(), check_sampling=check_sampling)

    score(checked(), write(tmp_path / "in.jsonl", lines), tmp_path)
    work_off(redis, checked, answer=answer)
    output, errors = read(tmp_path)
    assert [line["custom_id"] for line in output] == ["ok", "last"]
    assert len(errors) == len(bad)
    for line, (asked, reason) in zip(errors, bad, strict=True):
        assert line["response"] is None
        assert line["error"]["code"] == "invalid_request"
        assert reason in line["error"]["message"], (reason, line)
        name = asked.get("custom_id") if isinstance(asked, dict) else None
        assert line["custom_id"] == (name if isinstance(name, str) else None)
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert (manifest["rows"], manifest["errors"]) == (len(lines), len(bad))
    assert manifest["output"] == ["output.jsonl", "errors.jsonl"]


def test_a_custom_id_is_known_again_in_another_file_and_shard(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", [complete(f"{number}") for number in range(5)])
    packed = json.dumps(complete("3")) + "\n{bad\n" + json.dumps(complete("new")) + "\n"
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    score(make_context(), str(tmp_path / "in"), tmp_path)
    work_off(redis, make_context)
    output, errors = read(tmp_path)
    assert [line["custom_id"] for line in output] == ["0", "1", "2", "3", "4", "new"]
    assert [line["custom_id"] for line in errors] == ["3", None]


def test_a_file_of_repeated_names_is_refused(
    make_context: MakeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_scan, "MAX_REPEATED", 3)
    source = write(tmp_path / "in.jsonl", [complete("same") for _ in range(5)])
    with pytest.raises(CorruptTable, match="4 of its 5 lines repeat the custom_id"):
        score(make_context(), source, tmp_path)


def test_a_batch_that_failed_is_stopped_at_the_limit_of_errors_and_resumed(
    redis: Redis, make_context: MakeContext, tmp_path: Path
) -> None:
    lines = [complete(f"{number}", model="gpt-4o") for number in range(6)]
    arguments = {"max_errors": 3}
    source = write(tmp_path / "in.jsonl", lines)
    score(make_context(), source, tmp_path, **arguments)
    for job in queued_jobs(redis)[:2]:
        task = opened_task(make_context(), job.func_name, job.args)
        assert list(task.requests()) == []
        assert task.num_requests == 0
        task.result()
        task.close()
        job.delete()
    assert queued_jobs(redis) == []
    score(make_context(), source, tmp_path)
    work_off(redis, make_context)
    output, errors = read(tmp_path)
    assert (len(output), len(errors)) == (0, 6)


@pytest.mark.parametrize(
    "options",
    [
        {"template": "{body}"}, {"messages_column": "x"}, {"prompt_column": "x"}, {"keep": ["url"]},
        {"drop": ["url"]}, {"output_prefix": "x"}, {"sampling": {"max_tokens": 4}}, {"single_file": "csv"},
        {"filename_column": "f"}, {"sampling_columns": {"seed": "s"}},
    ],
)  # fmt: skip
def test_what_the_lines_say_is_not_said_twice(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=f"{next(iter(options))} and a batch file"):
        RunSpec.from_arguments("in.jsonl", str(tmp_path), input_format="openai-batch", **options)


def test_a_spec_of_a_batch_gives_itself_again(tmp_path: Path) -> None:
    spec = RunSpec.from_arguments("in.jsonl", str(tmp_path), input_format="openai-batch", limit=5)
    again = RunSpec.from_arguments(**{k: v for k, v in spec.to_json().items() if v is not None})
    assert again == spec == RunSpec.from_json(spec.to_json())


def test_the_command_line_takes_a_batch(
    redis: Redis, make_context: MakeContext, tmp_path: Path, invoke: Invoke
) -> None:
    source = write(tmp_path / "requests.jsonl", [chat("a"), complete("b")])
    result = invoke("submit", source, tmp_path / "out", "--format", "openai-batch")
    assert result.exit_code == 0, result.output
    work_off(redis, make_context)
    work_off(redis, make_context)
    output, errors = read(tmp_path)
    assert ([line["custom_id"] for line in output], errors) == (["a", "b"], [])
    assert "openai-batch" in invoke("submit", "--help").output
    refused = invoke("submit", source, tmp_path / "o", "--format", "openai-batch", "--max-tokens", "5")
    assert "sampling and a batch file" in refused.output


@pytest.mark.parametrize("seed", [1])
def test_no_kill_costs_a_line_or_leaves_a_mark_before_the_files(
    redis: Redis, make_context: MakeContext, tmp_path: Path, seed: int
) -> None:
    lines = [complete(f"{number}", f"p{number}", temperature=0) for number in range(4)] + ["{bad"]
    source = write(tmp_path / "in.jsonl", lines)
    spec = RunSpec.from_arguments(
        source, str(tmp_path / "out"), input_format="openai-batch", rows_per_shard=2
    )
    rng, step = random.Random(seed), 0
    while True:
        redis.flushall()
        shutil.rmtree(spec.output, ignore_errors=True)
        finished = run_until_killed(make_context(), spec, Fuse(step))
        if finished is None:
            break
        if (tmp_path / "out" / "_SUCCESS").is_file():
            assert tuple(map(len, read(tmp_path))) == (4, 1)
        release_lock(redis, spec)
        recover(redis, make_context, spec, "unfinished jobs run again", finished)
        output, errors = read(tmp_path)
        texts = [line["response"]["body"]["choices"][0]["text"] for line in output]
        assert texts == [f"P{number}" for number in range(4)]
        assert [line["error"]["message"][:17] for line in errors] == ["line 5 is not JSO"]
        assert (tmp_path / "out" / "_SUCCESS").is_file()
        step += rng.randint(10, 25) if finished < 2 else rng.randint(2, 6)
    assert step > 60


@pytest.mark.parametrize("alias", [["gpt-4o-mini", "gpt-4o"], ["*"]])
def test_lines_that_name_a_model_are_answered_by_the_served_one_where_that_is_asked_for(
    redis: Redis, make_context: MakeContext, tmp_path: Path, alias: list[str]
) -> None:
    lines = [complete("a", model="gpt-4o"), chat("b", "hello", model="gpt-4o-mini"), complete("c", model="m")]
    lines += [complete("d", model="other"), complete("e", model=5)]
    score(make_context(), write(tmp_path / "in.jsonl", lines), tmp_path, model_alias=alias)
    work_off(redis, make_context)
    output, errors = read(tmp_path)
    others = [] if alias == ["*"] else ["d"]
    assert [line["custom_id"] for line in output] == [each for each in "abcd" if each not in others]
    assert {line["response"]["body"]["model"] for line in output} == {"m"}
    assert [line["custom_id"] for line in errors] == [*others, "e"]


def test_an_alias_is_for_batch_files(invoke: Invoke, redis: Redis, source: Path, tmp_path: Path) -> None:
    options = ("--model-alias", "gpt-4o", "--model-alias", "gpt-4")
    refused = invoke("submit", source, tmp_path / "out", *options)
    assert "model_alias is for batch files" in refused.output
    path = write(tmp_path / "in.jsonl", [complete("a", model="gpt-4o")])
    assert invoke("submit", path, tmp_path / "out", "--format", "openai-batch", *options).exit_code == 0
    (planning,) = queued_jobs(redis)
    assert planning.kwargs["model_alias"] == ["gpt-4o", "gpt-4"]
