"""OpenAI's batch files in and out: what its own client's types read, one line's fault costing that line."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from jobs.errors import InvalidJob
from jobs.installed import check_sampling
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import Answer, FakeCompletion, opened_task, refuse, shout
from tests.jobs.conftest import MakeContext
from tests.jobs.local_runs import Runs

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


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


@pytest.fixture
def make_context(make_context: MakeContext) -> MakeContext:
    return lambda: replace(make_context(), check_sampling=check_sampling)


Score = Callable[..., tuple[list[dict[str, Any]], list[dict[str, Any]]]]


@pytest.fixture
def score(runs: Runs, tmp_path: Path) -> Score:
    """Runs lines to their end; returns those of the output file and of the error file."""

    def run(lines: list[Any] | Path, answer: Answer = shout, **options: Any) -> Any:
        source = lines if isinstance(lines, Path) else write(tmp_path / "in.jsonl", lines)
        planned = runs.plan(source, input_format="openai-batch", rows_per_shard=2, **options)
        assert planned["shards"] > 0
        assert not (runs.output / "output.jsonl").exists()
        runs.work(answer)
        return read(tmp_path)

    return run


def read(tmp_path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of the output file and of the error file."""
    files = [(tmp_path / "out" / name).read_text() for name in ("output.jsonl", "errors.jsonl")]
    output, errors = ([json.loads(line) for line in text.splitlines()] for text in files)
    for line in (*output, *errors):
        assert line.keys() == {"id", "custom_id", "response", "error"}
    return output, errors


def test_openais_types_read_what_its_lines_get(score: Score) -> None:
    lines = [
        chat(
            "c-1",
            "hello",
            model="m",
            temperature=0,
            max_completion_tokens=5,
            stream=False,
            user="u",
        ),
        complete("t-1", "a text", max_tokens=3),
        complete("t-2", ["one", "two"], n=1, seed=7),
        complete("t-3", [1, 2, 3]),
        chat("ünï/ 4", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ]
    output, errors = score(lines)
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


def test_each_line_has_values_of_its_own_and_a_seed_that_stays(runs: Runs, tmp_path: Path) -> None:
    lines = [
        complete("a", "p", temperature=0.5),
        complete("b", "p", seed=3),
        complete("c", "p", seed=None),
    ]
    source = write(tmp_path / "in.jsonl", lines)
    runs.plan(source, input_format="openai-batch", rows_per_shard=2, sampling={"seed": 1})

    def requests() -> list[Request]:
        opened = [opened_task(runs.context(), job.func_name, job.args) for job in runs.jobs]
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


def test_lines_of_embeddings_are_what_openais_types_read(score: Score) -> None:
    lines = [
        embed("a", "x"),
        complete("b", "p"),
        embed("c", [[5, 6], "yz"], encoding_format="base64"),
    ]
    numbers = [0.5, -1.25]

    def answer(request: Request) -> FakeCompletion:
        return replace(shout(request), embedding=numbers if request.kind == "embed" else None)

    found, _ = score(lines, answer)
    bodies = {line["custom_id"]: line["response"]["body"] for line in found}
    read = CreateEmbeddingResponse.model_validate(bodies["a"], strict=True)
    assert read.data[0].embedding == numbers
    assert read.usage.total_tokens == 1
    assert [each["embedding"] for each in bodies["c"]["data"]] == ["AAAAPwAAoL8="] * 2
    assert bodies["b"]["object"] == "text_completion"


def test_a_line_may_be_longer_than_any_of_its_prompts(score: Score) -> None:
    texts = ["long " * 200] * 1100

    def answer(request: Request) -> FakeCompletion:
        return replace(shout(request), embedding=[0.5, -1.25])

    (found,), errors = score([embed("a", texts)], answer)
    assert errors == []
    assert len(found["response"]["body"]["data"]) == len(texts)


def test_a_bad_line_costs_that_line_and_says_why(runs: Runs, score: Score) -> None:
    bad: list[tuple[Any, str]] = [
        ("{no json", "line 2 is not JSON"),
        ("[1]", "line 3 is JSON, but no object"),
        ({**complete("x"), "custom_id": 5}, "custom_id is 5, expected a text"),
        ({**complete("x3"), "url": "/v1/moderations"}, "url is '/v1/moderations', expected '/v1/chat/completions'"),
        ({**complete("x5"), "body": '{"prompt": "a"}'}, "body is "),
        ({"custom_id": "x6", "method": "POST", "url": CHAT, "body": {}}, "body has no 'messages'"),
        (complete("x7", model="gpt-4o"), "asks for model 'gpt-4o', and this worker serves 'm'"),
        (complete("x8", model="gpt 4"), "model_alias 'gpt 4' (--model-alias 'gpt 4'), so that"),
        (complete("x10", unheard_of=1), "unheard_of"),
        (complete("x14", "refused by the engine"), "too long for me"),
        (complete("x15", ["fine", "refused by the engine"]), "choice 1: too long for me"),
    ]  # fmt: skip

    def answer(request: Request) -> FakeCompletion:
        refused = request.prompt == "refused by the engine"
        return refuse("too long for me") if refused else shout(request)

    lines = [complete("ok"), *(line for line, _ in bad), complete("last")]
    output, errors = score(lines, answer)
    assert [line["custom_id"] for line in output] == ["ok", "last"]
    assert len(errors) == len(bad)
    for line, (asked, reason) in zip(errors, bad, strict=True):
        assert line["response"] is None
        assert line["error"]["code"] == "invalid_request"
        assert reason in line["error"]["message"], (reason, line)
        name = asked.get("custom_id") if isinstance(asked, dict) else None
        assert line["custom_id"] == (name if isinstance(name, str) else None)
    assert (runs.manifest["rows"], runs.manifest["errors"]) == (len(lines), len(bad))
    assert runs.manifest["output"] == ["output.jsonl", "errors.jsonl"]


def test_what_cannot_be_honoured_is_left_out_on_wish_and_named(
    runs: Runs, score: Score, tmp_path: Path
) -> None:
    messages = [
        {"role": "user", "content": "hi", "weight": 1, "name": "u", "refusal": None},
        {"role": "assistant", "content": "yes", "annotations": [{}], "audio": None},
        {"role": "user", "content": "go on"},
    ]
    lines = [
        complete("a", temperature=0, stream=True, best_of=5, tools=[], top_logprobs=3),
        chat("b", store=True, n=1, metadata={"a": "b"}, unheard_of=1, verbosity="high"),
        chat("c", web_search_options={}, verbosity="medium", check={"regex": 5}),
        {**chat("d"), "body": {"messages": messages, "response_format": {"type": "text"}}},
        {**embed("e"), "body": {"input": "hi", "dimension": 2}},
        {**chat("f"), "url": "/v1/responses", "body": {"input": "hi", "background": True}},
        complete("g", temperature="hot"),
    ]

    def answer(request: Request) -> FakeCompletion:
        return replace(shout(request), embedding=[0.5])

    assert len(score(lines, answer)[1]) == len(lines)
    shutil.rmtree(runs.output)
    output, errors = score(lines, answer, drop_unsupported=True)
    assert [line["custom_id"] for line in output] == ["a", "b", "d", "e", "f"]
    assert "regex of check" in errors[0]["error"]["message"]
    assert "temperature arrived as the text" in errors[1]["error"]["message"]
    left_out = runs.manifest["statistics"]["left_out"]
    names = ["stream", "best_of", "tools", "top_logprobs", "store", "unheard_of", "verbosity"]
    names += ["messages[].weight", "messages[].annotations", "dimension", "background"]
    assert left_out == dict.fromkeys(names, 1)
    report = (runs.output / "_report.html").read_text()
    assert "Arguments that were left out" in report
    assert "messages[].weight" in report


def test_extra_keys_of_a_columns_messages_are_left_out_on_wish(runs: Runs) -> None:
    chats = [[{"role": "user", "content": "hi", "id": 7}], [{"role": "user", "content": "ho"}]]
    runs.write(["", ""], chat=[json.dumps(each) for each in chats])
    table = runs.score(messages_column="chat", output=runs.output.with_name("refused"))
    assert "--drop-unsupported" in table["error"][0].as_py()
    table = runs.score(messages_column="chat", drop_unsupported=True)
    assert table["error"].to_pylist() == [None, None]
    with pytest.raises(InvalidJob, match="drop_unsupported is for batch files"):
        RunSpec.from_arguments("in", "out", drop_unsupported=True)


def test_lines_of_several_files_are_answered_each_also_those_of_one_name(
    score: Score, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.jsonl", [complete(f"{number}") for number in range(5)])
    packed = json.dumps(complete("3")) + "\n{bad\n" + json.dumps(complete("new")) + "\n"
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    output, errors = score(tmp_path / "in")
    assert [line["custom_id"] for line in output] == ["0", "1", "2", "3", "4", "3", "new"]
    assert [line["custom_id"] for line in errors] == [None]


@pytest.mark.parametrize(
    "options",
    [
        {"template": "{body}"},
        {"keep": ["url"]},
        {"sampling": {"max_tokens": 4}},
        {"single_file": "csv"},
    ],
)
def test_what_the_lines_say_is_not_said_twice(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=f"{next(iter(options))} and a batch file"):
        RunSpec.from_arguments("in.jsonl", str(tmp_path), input_format="openai-batch", **options)


def test_a_worker_takes_the_normal_form_that_a_producer_sends(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "input_format": "openai-batch",
        "model_alias": ["*"],
        "sampling": {"seed": 1},
    }
    spec = RunSpec.from_arguments("in.jsonl", str(tmp_path), **options)
    assert RunSpec.from_arguments(**spec.to_json()) == spec


@pytest.mark.parametrize("alias", [["gpt-4o-mini", "gpt-4o"], ["*"]])
def test_lines_that_name_a_model_are_answered_by_the_served_one_where_that_is_asked_for(
    score: Score, alias: list[str]
) -> None:
    lines = [
        complete("a", model="gpt-4o"),
        chat("b", "hello", model="gpt-4o-mini"),
        complete("c", model="m"),
    ]
    lines += [complete("d", model="other"), complete("e", model=5)]
    output, errors = score(lines, model_alias=alias)
    others = [] if alias == ["*"] else ["d"]
    assert [line["custom_id"] for line in output] == [each for each in "abcd" if each not in others]
    assert {line["response"]["body"]["model"] for line in output} == {"m"}
    assert [line["custom_id"] for line in errors] == [*others, "e"]


def test_a_line_for_another_endpoint_than_the_batchs_fails_alone(score: Score) -> None:
    lines = [chat("a"), complete("b"), embed("c")]
    answered, failed = score(lines, batch_endpoint=TEXT)
    assert [line["custom_id"] for line in answered] == ["b"]
    assert [line["custom_id"] for line in failed] == ["a", "c"]
    assert failed[0]["error"] == {
        "code": "mismatched_endpoint",
        "message": f"mismatched endpoint: the line's url is {CHAT!r}, and the batch is for {TEXT!r}",
    }
