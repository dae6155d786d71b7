"""gpt-oss's channels: reasoning, calls and the answer are told apart in texts, budgets and stop strings."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine import Engine, EngineConfig, SamplingParams
from engine.text import harmony
from engine.text.harmony import open_header, split_channels
from engine.text.reasoning import Reasoner
from engine.text.stop_strings import StopStrings

THINKS = "<|channel|>analysis<|message|>The user says hi.<|end|>"
ANSWERS = "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
CALLS = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
SAYS = "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
WRITTEN_CALL = '<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>'
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<|channel|>commentary <|constrain|>json{% endif %}<|start|>assistant"
)
HI = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        (THINKS + ANSWERS, "The user says hi.", "Hello!"),
        (THINKS, "The user says hi.", ""),
        (THINKS + ANSWERS[:-11], "The user says hi.", "Hello"),
        (THINKS + CALLS, "The user says hi.", WRITTEN_CALL),
        (THINKS + SAYS + CALLS, "The user says hi.", "I will look." + WRITTEN_CALL),
        (THINKS + THINKS[:-7], "The user says hi.\nThe user says hi.", ""),
        ("<|channel|>final<|message|>Hello!", None, "Hello!"),
        ("<|channel|>anal", None, ""),
        (THINKS + "<|start|>assistant<|chan", "The user says hi.", ""),
        ("Hello!", None, "Hello!"),
        ("Hello!<|return|>", None, "Hello!"),
        ("", None, ""),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", "1+1", ""),
    ],
)
def test_channels_part_reasoning_calls_and_answer(
    text: str, reasoning: str | None, rest: str
) -> None:
    assert split_channels(text) == (reasoning, rest)
    if text.startswith("<|channel|>") and harmony.MESSAGE in text:
        assert split_channels("assistant" + text) == (reasoning, rest)


@pytest.mark.parametrize(
    ("prompt", "header"),
    [
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", "assistant"),
        ("<|start|>assistant<|channel|>final<|message|>He", "assistant<|channel|>final<|message|>"),
        ("<|start|>user<|message|>hi<|end|>", ""),
        ("hi", ""),
    ],
)
def test_a_prompt_may_leave_a_message_open(prompt: str, header: str) -> None:
    assert open_header(prompt) == header


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(folders["gqa2_tied_hub"], folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(harmony.MARKS)})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with Engine(
        EngineConfig(str(folder), dtype="float32", kv_cache_bytes=1 << 22, block_size=4)
    ) as built:
        yield built


def completed(engine: Engine, text: str, **options: Any) -> Any:
    """The completion of a chat whose answer is this text and then whatever the model writes; ended by <|return|>."""
    tokenizer = engine._tokenizer
    known = tokenizer.encode_alone(text)
    prompt = engine.chat_token_ids(HI)
    end_id = tokenizer.added_tokens[harmony.RETURN].token_id
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        allowed_token_ids=[end_id],
        stop_token_ids=[end_id],
        **options,
    )
    engine.add("a", prompt, params, continued=known)
    while engine.has_unfinished:
        for completion in engine.step():
            return completion
    raise AssertionError


def test_an_engine_reads_the_channels_of_an_answer(engine: Engine) -> None:
    text = THINKS + ANSWERS.removesuffix(harmony.RETURN)
    found = completed(engine, text, separate_reasoning=True)
    assert (found.reasoning, found.text) == ("The user says hi.", "Hello!")
    assert completed(engine, text).text == "analysisThe user says hi.assistantfinalHello!"
    shown = completed(engine, text, separate_reasoning=True, skip_special_tokens=False)
    assert (shown.reasoning, shown.text) == ("The user says hi.", "Hello!")


@pytest.mark.parametrize("separate", [True, False])
def test_an_engine_reads_calls_in_channels(engine: Engine, separate: bool) -> None:
    found = completed(engine, THINKS + SAYS + CALLS, separate_reasoning=separate, tools=[ADD])
    assert found.tool_calls == [{"name": "add", "arguments": '{"a": 1}'}]
    if separate:
        assert (found.reasoning, found.text) == ("The user says hi.", "I will look.")
    other = {"type": "function", "function": {"name": "other"}}
    found = completed(engine, THINKS + CALLS, separate_reasoning=True, tools=[other])
    assert found.tool_calls is None
    assert found.text == WRITTEN_CALL
    assert "no such tool" in found.tool_call_error


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        (THINKS + ANSWERS, "!", "analysisThe user says hi.assistantfinalHello"),
        (THINKS + ANSWERS, "hi", None),
        (THINKS + SAYS + CALLS, "a", None),
        (THINKS + SAYS + CALLS, "will", "analysisThe user says hi.assistantcommentaryI "),
        (THINKS + SAYS + ANSWERS, ".assistant", None),
        ("Hello there!", "there", "Hello "),
        ("<|channel|>analysis<|message|>final", "final", None),
    ],
)
def test_stop_strings_count_in_the_answer_alone(
    engine: Engine, text: str, stop: str, wanted: str | None
) -> None:
    tokenizer = engine._tokenizer
    span = Reasoner(tokenizer, engine._sequences._vocab_size).answer_span(
        (), engine.chat_token_ids(HI), [stop]
    )
    assert span is not None
    watch = StopStrings(
        [stop],
        tokenizer.incremental_text(follows_text=True),
        min_tokens=0,
        answer_part=span.answer_part,
    )
    assert any(watch.add(token_id) for token_id in tokenizer.encode_alone(text)) == (
        wanted is not None
    )
    assert watch.text == wanted


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_the_reasoning_and_opens_the_answer(engine: Engine, budget: int) -> None:
    tokenizer = engine._tokenizer
    prompt = [*engine.chat_token_ids(HI), *tokenizer.encode_alone(harmony.REASONING_START)]
    params = replace(GREEDY, thinking_token_budget=budget, separate_reasoning=True)
    (found,) = engine.generate([prompt], params)
    forced = tokenizer.encode_behind(harmony.ANSWER_START)
    assert found.token_ids[budget : budget + len(forced)] == forced
    (free,) = engine.generate([prompt], replace(GREEDY, max_tokens=max(budget, 1)))
    assert found.token_ids[:budget] == free.token_ids[:budget]
    (rest,) = engine.generate(
        [[*prompt, *found.token_ids[: budget + len(forced)]]],
        replace(GREEDY, max_tokens=24 - budget - len(forced)),
    )
    assert found.token_ids[budget + len(forced) :] == rest.token_ids


@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["no tools", "tools"])
def test_text_that_spells_a_mark_is_no_mark(engine: Engine, tools: tuple[Any, ...]) -> None:
    """An answer may tell of channels and calls; only the tokens themselves are marks."""
    encode = engine._tokenizer.encode_alone
    answer = "Say <|end|> or <|channel|>analysis<|message|>x<|end|>, or " + WRITTEN_CALL
    spelled = [token_id for char in answer for token_id in encode(char)]
    opening = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    token_ids = [*encode(opening), *spelled]
    params = SamplingParams(max_tokens=1, tools=tools, separate_reasoning=True, ignore_eos=True)
    engine.add("spelled", engine.chat_token_ids(HI), params, continued=token_ids)
    completions = []
    while engine.has_unfinished:
        completions += engine.step()
    (completion,) = completions
    assert completion.reasoning == "why"
    assert completion.text.startswith(answer)
    assert completion.tool_calls is None
