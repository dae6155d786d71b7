"""What OpenAI's clients send anyway: values that change nothing, and messages with all that they may hold."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from jobs import errors
from jobs.context import JobContext
from jobs.parquet.prompts.prompt_source import messages_column
from jobs.prompts.arguments import NEUTRAL, without_neutral
from jobs.prompts.messages import normal_messages
from jobs.runs.plans.spec import RunSpec
from jobs.tasks import Request
from tests.examples import examples
from tests.jobs.answering import opened_task

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def request_of(context: JobContext, name: str, *args: Any, **kwargs: Any) -> Request:
    (request,) = opened_task(context, name, args, kwargs).requests()
    return request


@pytest.mark.parametrize("name", sorted(NEUTRAL))
@pytest.mark.parametrize("function", ["jobs.complete", "jobs.chat"])
def test_a_value_that_changes_nothing_is_taken(
    context: JobContext, function: str, name: str
) -> None:
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
        with pytest.raises(errors.InvalidJob, match=f"{name} arrived as the text"):
            request_of(context, "jobs.complete", "a", **{name: "1"})
    first, second = (
        RunSpec.from_arguments("in.parquet", "out", sampling={"logit_bias": biases})
        for biases in ({"50": 2, "7": 1}, {7: 1, 50: 2})
    )
    assert first.run == second.run == RunSpec(**json.loads(json.dumps(second.to_json()))).run


def test_reasoning_effort_is_a_variable_of_the_chats_template(context: JobContext) -> None:
    request = request_of(context, "jobs.chat", HI, reasoning_effort="low")
    assert request.chat_options == {"chat_template_kwargs": {"reasoning_effort": "low"}}
    variables = {"reasoning_effort": "high", "day": "Monday"}
    request = request_of(
        context, "jobs.chat", HI, reasoning_effort="low", chat_template_kwargs=variables
    )
    assert request.chat_options["chat_template_kwargs"] == {**variables, "reasoning_effort": "low"}
    assert request_of(context, "jobs.chat", HI, reasoning_effort=None).chat_options == {}
    with pytest.raises(errors.InvalidJob, match="reasoning_effort is int, expected a string"):
        request_of(context, "jobs.chat", HI, reasoning_effort=3)
    with pytest.raises(errors.InvalidJob, match="reasoning_effort belongs to a chat"):
        request_of(context, "jobs.complete", "hi", reasoning_effort="low")


def test_one_call_at_a_time_is_a_sampling_value(context: JobContext) -> None:
    request = request_of(context, "jobs.chat", HI, tools=[TOOL], parallel_tool_calls=False)
    assert not SamplingParams.from_mapping(request.sampling).parallel_tool_calls
    with pytest.raises(errors.InvalidJob, match="parallel_tool_calls arrived as the text"):
        request_of(context, "jobs.chat", HI, tools=[TOOL], parallel_tool_calls="false")


def test_a_run_takes_effort_and_one_call_at_a_time_too() -> None:
    sampling = {"reasoning_effort": "low", "parallel_tool_calls": False, "tools": [TOOL]}
    spec = RunSpec.from_arguments("in.parquet", "out", messages_column="m", sampling=sampling)
    values, options = spec.chat
    assert values == {"parallel_tool_calls": False}
    assert options == {"chat_template_kwargs": {"reasoning_effort": "low"}, "tools": [TOOL]}
    with pytest.raises(errors.InvalidJob, match="reasoning_effort belongs to a chat"):
        RunSpec.from_arguments("in.parquet", "out", sampling={"reasoning_effort": "low"})


def test_max_completion_tokens_is_max_tokens() -> None:
    for other in ({}, {"max_tokens": None}, {"max_tokens": 7}):
        assert without_neutral({"max_completion_tokens": 7, **other}) == {"max_tokens": 7}
    with pytest.raises(errors.InvalidJob, match="are one value, and differ"):
        without_neutral({"max_completion_tokens": 7, "max_tokens": 8})


def test_messages_keep_what_a_template_may_read() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
        {"role": "assistant", "reasoning": "why", "content": "three", "audio": None},
    ]
    assert normal_messages(messages) == [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        messages[2],
        {"role": "assistant", "reasoning": "why", "content": "three"},
    ]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "content of message 0 is NoneType"),
        ({"role": "assistant", "tool_calls": [7]}, "a tool call of message 0 must be"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 7}}]},
            "the arguments of a tool call of message 0 is int",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "'image_url': {'url': ...}",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "or an image_url: no audio"),
    ],
)
def test_what_no_template_can_be_given_is_named(message: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.InvalidJob) as refused:
        normal_messages([message])
    assert says in str(refused.value)


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


@settings(max_examples=examples(40))
@given(st.lists(MESSAGES, min_size=1, max_size=3))
def test_normal_messages_are_their_own_normal_form(messages: list[dict[str, Any]]) -> None:
    normal = normal_messages(messages)
    assert normal_messages(normal) == normal
    assert normal_messages(json.loads(json.dumps(normal))) == normal
    rendered = messages_column("chat").render({"chat": messages})
    assert json.loads(rendered) == normal


def test_tools_and_variables_reach_the_template_and_not_the_sampler(context: JobContext) -> None:
    variables = {"enable_thinking": False}
    request = request_of(
        context, "jobs.chat", HI, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True,
        chat_template_kwargs=variables, temperature=0,
    )  # fmt: skip
    assert request.sampling == {"temperature": 0, "separate_reasoning": True}
    assert request.chat_options == {"tools": [TOOL], "chat_template_kwargs": variables}
    assert request_of(context, "jobs.chat", HI, tools=[TOOL], tool_choice="none").chat_options == {}


def chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_a_call_that_is_forced_is_one_of_the_sampling_values_and_of_what_is_asked(
    context: JobContext,
) -> None:
    name = TOOL["function"]["name"]
    digests = {request_of(context, "jobs.chat", HI, tools=[TOOL]).digest("")}
    for choice in ("required", chosen(name)):
        request = request_of(context, "jobs.chat", HI, tools=[TOOL], tool_choice=choice)
        assert request.sampling["tool_choice"] == choice
        assert request.chat_options == {"tools": [TOOL]}
        digests.add(request.digest(""))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": "x"}, "tools is str, expected a list"),
        ({"tool_choice": "required"}, "tool_choice is 'required', and no tools are given"),
        (
            {"tools": [TOOL], "tool_choice": "any"},
            "tool_choice is 'any', expected 'auto', 'none', 'required' or",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function"}},
            "tool_choice is {'type': 'function'}, expected",
        ),
        (
            {"tools": [TOOL], "tool_choice": chosen("other")},
            "tool_choice names 'other', which is none of the tools",
        ),
    ],
)
def test_options_of_a_chat_that_cannot_be_are_named(
    context: JobContext, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(errors.InvalidJob) as refused:
        opened_task(context, "jobs.chat", [HI], options)
    assert says in str(refused.value)


def test_no_call_is_forced_where_labels_are_scored(context: JobContext) -> None:
    options = {"messages": HI, "labels": ["a", "b"], "tools": [TOOL], "tool_choice": "required"}
    with pytest.raises(
        errors.InvalidJob, match=r"tool_choice is 'required', and jobs\.classify generates nothing"
    ):
        opened_task(context, "jobs.classify", [], options)
    assert opened_task(context, "jobs.classify", [], {**options, "tool_choice": "none"})


def test_a_prompt_that_is_no_chat_takes_no_options_of_one(context: JobContext) -> None:
    options = {"tools": [TOOL]}
    with pytest.raises(errors.InvalidJob, match="tools belongs to a chat"):
        opened_task(context, "jobs.complete", ["a"], options)
    with pytest.raises(errors.InvalidJob, match="tools belongs to a chat"):
        RunSpec.from_arguments("in", "out", sampling=options)


def test_a_run_of_chats_keeps_their_options_apart_from_its_sampling_values() -> None:
    sampling = {"max_completion_tokens": 5, "stream": False, "tools": [TOOL], "top_p": None}
    spec = RunSpec.from_arguments("in", "out", messages_column="chat", sampling=sampling)
    values, chat = spec.chat
    assert values == {"max_tokens": 5}
    assert chat == {"tools": [TOOL]}
    assert RunSpec(**json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(errors.InvalidJob, match="stream is True"):
        RunSpec.from_arguments("in", "out", sampling={"stream": True})


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"structured_outputs": {"json_object": True}}),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}},
            },
            {"structured_outputs": {"json": {"type": "null"}}},
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
    "value", ["json_object", {"type": "structural_tag"}, {"type": "json_schema"}]
)
def test_another_response_format_is_refused_by_name(value: Any) -> None:
    with pytest.raises(errors.InvalidJob, match="response_format"):
        without_neutral({"response_format": value})
