"""What OpenAI's clients send anyway: values that change nothing, and messages with all that they may hold."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from engine import SamplingParams
from jobs import errors
from jobs.context import JobContext
from jobs.installed import check_sampling
from jobs.parquet.prompt_source import MessagesColumn
from jobs.prompts.client_values import NEUTRAL, without_neutral
from jobs.prompts.messages import UnusableMessages, normal_messages
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.jobs.answering import opened_task, run_task

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAID = {"user": "u-1", "metadata": {"team": "a"}, "safety_identifier": "s", "prompt_cache_key": "k"}


def request_of(context: JobContext, name: str, *args: Any, **kwargs: Any) -> Request:
    (request,) = opened_task(context, name, args, kwargs).requests()
    return request


@pytest.mark.parametrize("name", sorted(NEUTRAL))
@pytest.mark.parametrize("function", ["jobs.complete", "jobs.chat"])
def test_a_value_that_changes_nothing_is_taken(context: JobContext, function: str, name: str) -> None:
    prompt: Any = HI if function == "jobs.chat" else "hi"
    for value in (None, *NEUTRAL[name]):
        plain = request_of(context, function, prompt).sampling
        assert request_of(context, function, prompt, **{name: value}).sampling == plain


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_another_value_of_it_is_refused_by_name(name: str) -> None:
    for value in ("secret", 7, True, ["x"], {"type": "json_object"}):
        if not any(value == neutral for neutral in NEUTRAL[name]):
            with pytest.raises(errors.InvalidJob, match=rf"{name} (is|arrived as)") as refused:
                without_neutral({name: value})
            assert "secret" not in refused.value.log_text


def test_lists_and_mappings_reach_the_engine_as_json_has_them(context: JobContext) -> None:
    """And a run's, whose plan is JSON too, is the same run for keys that are numbers."""
    values: dict[str, Any] = {
        "logit_bias": {"50": 2, "7": -100}, "allowed_token_ids": [7, 50], "bad_words": ["x", " y"],
        "presence_penalty": 0.5, "frequency_penalty": 0, "repetition_penalty": 1.1,
    }  # fmt: skip
    sampling = request_of(context, "jobs.chat", HI, **json.loads(json.dumps(values))).sampling
    params = SamplingParams.from_mapping(sampling)
    assert params.logit_bias == {7: -100.0, 50: 2.0}
    assert params.allowed_token_ids == (7, 50)
    for name in values:
        with pytest.raises(errors.InvalidJob, match=f"{name} arrived as the text") as refused:
            request_of(context, "jobs.complete", "a", **{name: "1"})
        advice = re.search(rf"write {name}:='?(.*?)'?, in Python", str(refused.value))
        assert advice is not None
        check_sampling({name: json.loads(advice[1])})  # what it says to write is taken
        with pytest.raises(errors.InvalidJob, match=name):
            check_sampling({name: [{"secret": 1}]})
    specs = [
        RunSpec.from_arguments("in.parquet", "out", sampling={"logit_bias": biases})
        for biases in ({"50": 2, "7": 1}, {7: 1, 50: 2})
    ]
    assert specs[0] == specs[1] == RunSpec.from_json(json.loads(json.dumps(specs[1].to_json())))
    assert specs[0].run == specs[1].run


def test_a_truth_value_is_no_number() -> None:
    for name, value in (("stream", 0), ("length_penalty", True), ("best_of", True)):
        with pytest.raises(errors.InvalidJob, match=name):
            without_neutral({name: value})


def test_best_of_as_many_as_there_are_answers_changes_nothing() -> None:
    assert without_neutral({"best_of": 3, "n": 3}) == {"n": 3}
    with pytest.raises(errors.InvalidJob, match="best_of is 4"):
        without_neutral({"best_of": 4, "n": 3})


def test_what_is_said_of_a_request_is_taken_and_of_its_type(context: JobContext) -> None:
    plain = request_of(context, "jobs.chat", HI).sampling
    assert request_of(context, "jobs.chat", HI, **SAID).sampling == plain == {"separate_reasoning": True}
    assert request_of(context, "jobs.complete", "a", **dict.fromkeys(SAID)).sampling == {}
    for name in SAID:
        with pytest.raises(errors.InvalidJob, match=rf"{name} is int, expected"):
            without_neutral({name: 7})


def test_max_completion_tokens_is_max_tokens() -> None:
    assert without_neutral({"max_completion_tokens": 7}) == {"max_tokens": 7}
    assert without_neutral({"max_completion_tokens": 7, "max_tokens": None}) == {"max_tokens": 7}
    assert without_neutral({"max_completion_tokens": 7, "max_tokens": 7}) == {"max_tokens": 7}
    assert without_neutral({"max_completion_tokens": None, "max_tokens": 8}) == {"max_tokens": 8}
    with pytest.raises(errors.InvalidJob, match="max_tokens is 8 and max_completion_tokens is 7"):
        without_neutral({"max_completion_tokens": 7, "max_tokens": 8})


def test_null_is_every_values_default(context: JobContext) -> None:
    nothing = dict.fromkeys(each.name for each in fields(SamplingParams))
    assert SamplingParams.from_mapping(nothing) == SamplingParams()
    check_sampling(request_of(context, "jobs.complete", "a", **nothing).sampling)
    response = run_task(context, "jobs.complete", ["a", None], **nothing)
    assert [choice["finish_reason"] for choice in response["choices"]] == ["stop", "error"]
    with pytest.raises(errors.InvalidJob, match="'max_tokns' is no sampling parameter"):
        check_sampling({"max_tokns": None})


def test_the_served_model_may_be_named_and_no_other(context: JobContext) -> None:
    assert run_task(context, "jobs.chat", HI, model="m")["model"] == "m"
    assert run_task(context, "jobs.chat", HI, model=None)["model"] == "m"
    with pytest.raises(errors.ModelNotServed, match="'gpt-4o'"):
        run_task(context, "jobs.chat", HI, model="gpt-4o")


def test_messages_keep_what_a_template_may_read() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        {"role": "assistant", "reasoning": "why", "content": "three", "audio": None},
    ]
    assert normal_messages(messages) == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        messages[2],
        {"role": "assistant", "reasoning": "why", "content": "three"},
    ]


def test_an_answer_of_openais_client_may_be_sent_back() -> None:
    answer = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    )
    (message,) = normal_messages([answer.model_dump()])
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "content of message 0 is NoneType"),
        ({"role": "assistant", "tool_calls": []}, "has no 'content'"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls of message 0 is str"),
        ({"role": "assistant", "tool_calls": [7]}, "a tool call of message 0 must be"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, "a tool call of message 0 must be"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a"}}]},
            "of the type 'custom'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 7}}]},
            "the arguments of a tool call of message 0 is int",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "tool_call_id of message 0 is int"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, "message 0 holds 'audio'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "no images, audio or video"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "no images, audio or video"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "exactly 'type' and 'text'"),
    ],
)
def test_what_no_template_can_be_given_is_named(message: dict[str, Any], says: str) -> None:
    with pytest.raises(UnusableMessages) as refused:
        normal_messages([message])
    assert says in str(refused.value)


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(100_000):
        arguments = {"a": arguments}
    call = {"function": {"name": "a", "arguments": arguments}}
    with pytest.raises(UnusableMessages, match="nested too deeply"):
        normal_messages([{"role": "assistant", "tool_calls": [call]}])


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
CALLS = st.builds(
    lambda name, id_, arguments: {"id": id_, "function": {"name": name, "arguments": arguments}},
    TEXTS, st.none() | TEXTS, st.none() | TEXTS | st.dictionaries(TEXTS, st.integers(), max_size=2),
)  # fmt: skip
MESSAGES = st.fixed_dictionaries(
    {
        "role": TEXTS,
        "content": TEXTS
        | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=2),
    },
    optional={
        **dict.fromkeys(("name", "tool_call_id", "reasoning"), st.none() | TEXTS),
        "refusal": st.none(),
        "tool_calls": st.lists(CALLS, max_size=2),
    },
)


@given(st.lists(MESSAGES, min_size=1, max_size=3))
def test_normal_messages_are_their_own_normal_form(messages: list[dict[str, Any]]) -> None:
    normal = normal_messages(messages)
    assert normal_messages(normal) == normal
    assert normal_messages(json.loads(json.dumps(normal))) == normal
    rendered = MessagesColumn("chat").render({"chat": messages})
    assert json.loads(rendered) == normal
    assert (
        MessagesColumn("chat").render({"chat": [dict(reversed(each.items())) for each in messages]})
        == rendered
    )


def test_tools_and_variables_reach_the_template_and_not_the_sampler(context: JobContext) -> None:
    variables = {"enable_thinking": False}
    request = request_of(
        context, "jobs.chat", HI, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True,
        chat_template_kwargs=variables, temperature=0,
    )  # fmt: skip
    assert request.sampling == {"temperature": 0, "separate_reasoning": True}
    assert request.chat_options == {"tools": [TOOL], "chat_template_kwargs": variables}
    assert request_of(context, "jobs.chat", HI, tools=[TOOL], tool_choice="none").chat_options == {}
    for nothing in (
        {},
        {"tools": None, "chat_template_kwargs": None},
        {"tools": [], "chat_template_kwargs": {}},
    ):
        assert request_of(context, "jobs.chat", HI, **nothing).chat_options == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": "x"}, "tools is str, expected a list"),
        ({"tools": ["x"]}, "tool 0 must be"),
        ({"tools": [{"type": "web_search"}]}, "tool 0 is of the type 'web_search'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tool 0 has no function with a name"),
        ({"tools": [TOOL] * 1001}, "1001 functions, more than the limit of 1000"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice is 'required', which is not built"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice is {'type'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is False"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs is str, expected an object"),
    ],
)
def test_options_of_a_chat_that_cannot_be_are_named(
    context: JobContext, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.InvalidJob) as refused:
        opened_task(context, "jobs.chat", [HI], options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"tools": [TOOL]}, {"chat_template_kwargs": {"a": 1}}, {"tool_choice": "auto"}]
)
def test_a_prompt_that_is_no_chat_takes_no_options_of_one(
    context: JobContext, options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(errors.InvalidJob, match=f"{name} belongs to a chat"):
        opened_task(context, "jobs.complete", ["a"], options)
    with pytest.raises(errors.InvalidJob, match=f"{name} belongs to a chat"):
        RunSpec.from_arguments("in", "out", sampling=options)


def test_a_run_of_chats_keeps_their_options_apart_from_its_sampling_values() -> None:
    sampling = {"max_completion_tokens": 5, "stream": False, "tools": [TOOL], "top_p": None}
    spec = RunSpec.from_arguments("in", "out", messages_column="chat", sampling=sampling)
    values, chat = spec.chat
    assert values == {"max_tokens": 5}
    assert (chat.template, chat.has_tools) == ({"tools": [TOOL]}, True)
    assert RunSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(errors.InvalidJob, match="stream is True"):
        RunSpec.from_arguments("in", "out", sampling={"stream": True})


def test_a_chats_response_is_of_openais_type(context: JobContext) -> None:
    response = run_task(context, "jobs.chat", HI, **SAID, stream=False, response_format={"type": "text"})
    assert ChatCompletion.model_validate(response).choices[0].message.content


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, {}),
        (None, {}),
        ({"type": "json_object"}, {"structured_outputs": {"json_object": True}}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}}},
            {"structured_outputs": {"json": {"type": "null"}}},
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"structured_outputs": {"json_object": True}},
        ),
    ],
)
def test_a_response_format_is_what_the_text_must_be(
    context: JobContext, response_format: Any, expected: dict[str, Any]
) -> None:
    sampling = request_of(context, "jobs.chat", HI, response_format=response_format).sampling
    assert sampling == {**expected, "separate_reasoning": True}
    SamplingParams.from_mapping(sampling)


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": {"type": "structural_tag"}}, {"response_format": "json_object"},
        {"response_format": {"type": "json_schema"}}, {"response_format": {}}, {"response_format": [1]},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)  # fmt: skip
def test_one_that_says_something_else_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidJob, match="response_format"):
        without_neutral(values)


def test_older_names_of_structured_outputs_say_what_they_are_called_now(context: JobContext) -> None:
    for member, value in (("json", {"type": "integer"}), ("regex", "a"), ("choice", ["a"]), ("grammar", "x")):
        with pytest.raises(errors.InvalidJob) as refused:
            request_of(context, "jobs.complete", "hi", **{f"guided_{member}": value})
        assert f'structured_outputs={{"{member}": ...}}' in str(refused.value)
        assert without_neutral({f"guided_{member}": None}) == {}
