"""OpenAI's response shapes of real completions: log probabilities, echo, reasoning, calls of tools."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion
from transformers import PreTrainedTokenizerFast

from engine import Engine, EngineConfig, SamplingParams
from engine.schedule.outputs import Logprob
from jobs import errors
from jobs.context import JobContext
from jobs.installed import check_sampling
from jobs.prompts.messages import normal_messages
from jobs.tasks import Request
from tests.engine.checkpoints import SHAPES, make_checkpoint
from tests.jobs.answering import FakeCompletion, opened_task, run_task
from tests.jobs.local_runs import Runs
from worker.stock_worker import drive

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model") / "m", SHAPES[0])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with Engine(EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 22)) as built:
        yield built


def answered(
    context: JobContext, engine: Engine, name: str, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    task = opened_task(replace(context, check_sampling=check_sampling), name, args, kwargs)
    drive(task, engine)
    response = task.result()
    assert isinstance(response, dict)
    assert json.loads(json.dumps(response, allow_nan=False)) == response
    return response


def test_log_probabilities_of_a_completion_have_openais_shape(
    context: JobContext, engine: Engine
) -> None:
    response = answered(
        context, engine, "jobs.complete", ["The quick", "März"], logprobs=5, n=2, **GREEDY
    )
    for choice in TextCompletion.model_validate(response).choices:
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 6
        for token, logprob, top in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert top[token] == logprob == max(top.values()) < 0
            assert len(top) == 5


def shown_bytes(token: str) -> bytes:
    """Return the bytes of a token of a text_completion."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(each, 16) for each in token.removeprefix("bytes:").split("\\x")[1:])


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_are_parts_of_characters_have_their_bytes_and_places(
    context: JobContext, engine: Engine, seed: int
) -> None:
    """Their bytes joined are the text, none takes another's place, and offsets count the text's characters."""
    options = {"temperature": 3.0, "seed": seed, "max_tokens": 40, "ignore_eos": True}
    asked = ("März ☃ über 😀", {"logprobs": 5, "echo": True, **options})
    (choice,) = answered(context, engine, "jobs.complete", asked[0], **asked[1])["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    special = {text for text, token in engine._tokenizer.added_tokens.items() if token.is_special}
    visible = [token for token in tokens if token not in special]
    assert b"".join(map(shown_bytes, visible)).decode(errors="replace") == choice["text"]
    assert all(len(top) in (5, 6) for top in choice["logprobs"]["top_logprobs"][1:])
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token not in special:
            assert choice["text"][offset : offset + len(token)] == token
    assert offsets == sorted(offsets)
    chat = answered(context, engine, "jobs.chat", HI, logprobs=True, top_logprobs=5, **options)[
        "choices"
    ][0]
    content = chat["logprobs"]["content"]
    for entry in content:
        for token in (entry, *entry["top_logprobs"]):
            assert bytes(token["bytes"]).decode(errors="backslashreplace") == token["token"]


def test_one_seed_gives_each_prompt_of_a_list_its_own_noise(
    context: JobContext, engine: Engine
) -> None:
    """With one uniform for all, nearly flat distributions would give all prompts nearly the same token."""
    prompts = [f"prompt {number}" for number in range(60)]
    options = {"seed": 7, "temperature": 50.0, "max_tokens": 1, "logprobs": 0, "ignore_eos": True}
    response = answered(context, engine, "jobs.complete", prompts, **options)
    tokens = {choice["logprobs"]["tokens"][0] for choice in response["choices"]}
    assert len(tokens) > 40
    again = answered(context, engine, "jobs.complete", prompts, **options)
    assert [choice["text"] for choice in again["choices"]] == [
        choice["text"] for choice in response["choices"]
    ]


def test_equal_texts_of_different_tokens_do_not_take_each_others_place(context: JobContext) -> None:
    row = {5: Logprob(-0.5, 1, "a"), 7: Logprob(-1.5, 2, "a"), 9: Logprob(-2.5, 3, "b")}
    sample = FakeCompletion("a", token_ids=[5], logprobs=[row])
    response = run_task(context, "jobs.complete", "x", logprobs=3, answer=lambda _: sample)
    (top,) = response["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"a": -0.5, "token_id:7": -1.5, "b": -2.5}


def test_log_probabilities_of_a_chat_have_openais_shape(
    context: JobContext, engine: Engine
) -> None:
    options = GREEDY | {"temperature": 2.0, "seed": 3}
    response = answered(context, engine, "jobs.chat", HI, logprobs=True, top_logprobs=4, **options)
    found = ChatCompletion.model_validate(response).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 6
    for entry in found.content:
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert len(likeliest) == 4
        assert likeliest == sorted(likeliest, reverse=True)
        assert entry.logprob <= likeliest[0]
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode(errors="backslashreplace") == entry.token
    nothing = answered(context, engine, "jobs.chat", HI, logprobs=False, **GREEDY)
    assert nothing["choices"][0]["logprobs"] is None


def test_echo_gives_the_prompt_and_its_log_probabilities(
    context: JobContext, engine: Engine
) -> None:
    prompt = "The quick brown"
    (choice,) = answered(context, engine, "jobs.complete", prompt, echo=True, logprobs=2, **GREEDY)[
        "choices"
    ]
    token_ids = engine.prepare(prompt).token_ids
    text = engine._tokenizer.decode(token_ids)
    assert choice["text"].startswith(text)
    (scored,) = engine.generate(
        [token_ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    )
    assert scored.prompt_logprobs is not None
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["text_offset"]) == len(token_ids) + 6
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    for token_id, logprob, wanted in zip(
        token_ids[1:], found["token_logprobs"][1:], scored.prompt_logprobs[1:], strict=False
    ):
        assert wanted is not None
        assert math.isclose(logprob, wanted[token_id].logprob, abs_tol=1e-5)
    alone = answered(
        context, engine, "jobs.complete", prompt, echo=True, **GREEDY | {"max_tokens": 0}
    )
    assert alone["choices"][0]["text"] == text
    assert alone["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("jobs.complete", {"logprobs": True}, "logprobs is True, expected a number"),
        ("jobs.complete", {"top_logprobs": 2}, "'top_logprobs' is not built"),
        ("jobs.chat", {"top_logprobs": 2}, "needs logprobs=true"),
        ("jobs.chat", {"echo": True}, "echo belongs to jobs.complete"),
    ],
)
def test_what_cannot_be_asked_is_named(
    context: JobContext, name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.InvalidJob) as refused:
        opened_task(
            replace(context, check_sampling=check_sampling),
            name,
            [HI if "chat" in name else "a"],
            options,
        )
    assert says in str(refused.value)


def test_a_chats_reasoning_stands_apart(context: JobContext, engine: Engine) -> None:
    options = GREEDY | {"thinking_token_budget": 3}
    message = answered(context, engine, "jobs.chat", HI, **options)["choices"][0]["message"]
    whole = answered(context, engine, "jobs.chat", HI, separate_reasoning=False, **options)[
        "choices"
    ][0]["message"]
    assert "reasoning" not in whole
    inner, _, after = whole["content"].partition("</think>")
    assert (message["reasoning"], message["content"]) == (inner.strip("\n"), after.lstrip("\n"))
    assert (
        normal_messages([message])[0]["reasoning"] == message["reasoning"]
        or not message["reasoning"]
    )


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": "</tool_call> {"}}\n</tool_call>'
CALL = {"name": "add", "arguments": '{"a": "</tool_call> {"}'}


def test_calls_become_tool_calls_and_go_back_through_the_template(
    context: JobContext, engine: Engine
) -> None:
    called = FakeCompletion(
        "Let me see.", reasoning="why", tool_calls=[CALL, CALL], tool_call_error="a third is none"
    )
    response = run_task(context, "jobs.chat", HI, tools=[TOOL], answer=lambda _: called)
    assert response["choices"][0]["tool_call_error"] == "a third is none"
    choice = ChatCompletion.model_validate(response).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    answers = [{"role": "tool", "content": "3", "tool_call_id": each} for each in ids]
    messages = [*HI, choice.message.model_dump(), *answers]
    found = engine._tokenizer.decode(
        engine.chat_token_ids(normal_messages(messages), tools=[TOOL]), skip_special_tokens=False
    )
    function = '{"arguments": {"a": "</tool_call> {"}, "name": "add"}'
    assert (
        f"Let me see.<tool_call>{function}</tool_call><tool_call>{function}</tool_call>"
        in found.replace('{"name": "add", "arguments": {"a": "</tool_call> {"}}', function)
    )
    assert found.count("<|im_start|>tool\n3") == 2
    assert answered(context, engine, "jobs.chat", messages, tools=[TOOL], **GREEDY)["choices"]


def test_the_engine_reads_calls_of_the_tools_of_a_chat(context: JobContext, engine: Engine) -> None:
    options = {"structured_outputs": {"choice": [HERMES]}, "max_tokens": 200, "temperature": 0}
    (choice,) = answered(context, engine, "jobs.chat", HI, tools=[TOOL], **options)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [CALL]
    other = {"type": "function", "function": {"name": "other"}}
    (choice,) = answered(context, engine, "jobs.chat", HI, tools=[other], **options)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", HERMES)
    assert "no such tool" in choice["tool_call_error"]


ROOMS = {
    "type": "object",
    "properties": {"room": {"enum": ["attic", "hall"]}},
    "required": ["room"],
}
LIGHT = {
    "type": "function",
    "function": {"name": "light", "parameters": {**ROOMS, "additionalProperties": False}},
}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "light"}}]
)
def test_a_call_is_forced(context: JobContext, engine: Engine, choice: Any) -> None:
    options = {
        "tools": [LIGHT, TOOL] if isinstance(choice, dict) else [LIGHT],
        "tool_choice": choice,
        "n": 4,
    }
    response = answered(context, engine, "jobs.chat", HI, max_tokens=200, seed=1, **options)
    for made in ChatCompletion.model_validate(response).choices:
        assert made.finish_reason == "tool_calls"
        assert not made.message.content
        assert made.message.tool_calls is not None
        (call,) = made.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "light"
        assert json.loads(call.function.arguments)["room"] in ("attic", "hall")


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_text_stays_a_text(
    context: JobContext, engine: Engine, options: dict[str, Any]
) -> None:
    options = {
        "structured_outputs": {"choice": [HERMES]},
        "max_tokens": 200,
        "temperature": 0,
        **options,
    }
    (choice,) = answered(context, engine, "jobs.chat", HI, **options)["choices"]
    assert (choice["message"], choice["finish_reason"]) == (
        {"role": "assistant", "content": HERMES},
        "stop",
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_of_chats_has_columns_for_reasoning_and_calls(runs: Runs, n: int) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("call", "talk")]
    pq.write_table(pa.table({"chat": [*chats, None]}), runs.source)
    sampling = {"separate_reasoning": True, "tools": [TOOL], "n": n, "temperature": 0}
    runs.plan(messages_column="chat", sampling=sampling)
    seen = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        if "call" in str(request.messages):
            return FakeCompletion("", 0, [1], reasoning="why", tool_calls=[CALL])
        return FakeCompletion("yes", 0, [1], reasoning="why", tool_call_error="no such tool")

    runs.work(answer)
    assert all(request.chat_options == {"tools": [TOOL]} for request in seen)
    assert all(request.sampling["separate_reasoning"] for request in seen)
    names = ("completion", "reasoning", "tool_calls", "tool_call_error", "finish_reason")
    called, talked, failed = [
        {name: row[name][0] if n > 1 and row[name] else row[name] for name in names}
        for row in runs.rows()
    ]
    calls = json.loads(called.pop("tool_calls"))
    assert [call["function"] for call in calls] == [CALL]
    assert called == {
        "completion": "",
        "reasoning": "why",
        "tool_call_error": None,
        "finish_reason": "tool_calls",
    }
    text = {"completion": "yes", "reasoning": "why", "finish_reason": "stop"}
    assert talked == {**text, "tool_calls": None, "tool_call_error": "no such tool"}
    assert (failed["completion"], failed["finish_reason"]) in (
        (None, "error"),
        ([None] * n, "error"),
    )


#: Of each row one: what another row's has is not in it, and its own null and 24.0 stay.
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"day": {"default": 24}}}},
    },
    {
        "type": "function",
        "function": {"name": "g", "parameters": {"properties": {"t": {"default": 24.5}}}},
    },
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_tools_of_a_column_are_each_rows_own(runs: Runs, kind: str) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = [{"chat": chat, "tools": [tool]} for tool in TOOLS]
    rows += [{"chat": chat, "tools": None}, {"chat": chat, "tools": [{"type": "function"}]}]
    source = runs.source.with_name(f"in.{'jsonl' if kind == 'jsonl' else 'parquet'}")
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "text":
        pq.write_table(
            pa.Table.from_pylist([{**row, "tools": json.dumps(row["tools"])} for row in rows]),
            source,
        )
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    runs.plan(
        source,
        messages_column="chat",
        sampling_columns={"tools": "tools"},
        sampling={"temperature": 0},
    )
    seen = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        return (
            FakeCompletion("", 0, [1], tool_calls=[CALL])
            if request.chat_options
            else FakeCompletion("yes", 0, [1])
        )

    runs.work(answer)
    of_rows = sorted(
        (request.chat_options for request in seen), key=str
    )  # rows are asked in an order of their own
    assert of_rows == [{"tools": [TOOLS[0]]}, {"tools": [TOOLS[1]]}, {}]
    assert all("tools" not in request.sampling for request in seen)
    found = runs.rows()
    assert [row["finish_reason"] for row in found] == ["tool_calls", "tool_calls", "stop", "error"]
    assert "column 'tools': tool 0" in found[3]["error"]


def test_tool_choice_none_keeps_the_tools_of_rows_from_their_chats(runs: Runs) -> None:
    row = {"chat": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    pq.write_table(pa.Table.from_pylist([row]), runs.source)
    runs.plan(
        runs.source,
        messages_column="chat",
        sampling_columns={"tools": "tools"},
        sampling={"tool_choice": "none"},
    )
    seen = []

    def answer(request: Request) -> FakeCompletion:
        seen.append(request)
        return FakeCompletion("yes", 0, [1])

    runs.work(answer)
    [request] = seen
    assert request.chat_options == {}
    assert "tool_choice" not in request.sampling
    [row] = runs.rows()
    assert row["completion"] == "yes"
    assert "tool_calls" not in row


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"messages_column": "c", "sampling_columns": {"tool_choice": "t"}},
            "tool_choice cannot come from a column",
        ),
        (
            {"messages_column": "c", "sampling_columns": {"chat_template_kwargs": "t"}},
            "cannot come from a column",
        ),
        (
            {"prompt_column": "c", "sampling_columns": {"tools": "t"}},
            "tools from a column are for chats",
        ),
        (
            {"messages_column": "c", "sampling_columns": {"tools": "t"}, "check": {"regex": "a"}},
            "tools",
        ),
    ],
)
def test_what_a_column_cannot_say_of_a_chat_is_refused(
    runs: Runs, options: dict[str, Any], error: str
) -> None:
    pq.write_table(pa.table({"c": ["a"], "t": ["b"]}), runs.source)
    with pytest.raises(errors.InvalidJob, match=error):
        runs.plan(**options)


def test_prompt_log_probabilities_by_vllms_name(context: JobContext, engine: Engine) -> None:
    response = answered(context, engine, "jobs.complete", "The quick", prompt_logprobs=1, **GREEDY)
    first, *rest = response["choices"][0]["prompt_logprobs"]
    assert first is None
    assert all(entry["rank"] >= 1 for row in rest for entry in row.values())
