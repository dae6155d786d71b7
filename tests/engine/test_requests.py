"""What a request may be, how it ends, and that a bad one harms no other."""

import json
import math
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    Completion,
    DuplicateRequest,
    Engine,
    EngineBusy,
    EngineClosed,
    EngineConfig,
    InvalidPrompt,
    InvalidRequest,
    InvalidSampling,
    PromptTooLong,
    SamplingParams,
    ScoringParams,
    request_params,
)
from engine.run.kinds.table import ALL_KINDS
from engine.sampling.parameter_values import TOKEN_ID
from engine.sampling.request_kinds import KINDS
from engine.sampling.sampling_params import RANGES
from tests.engine.accounting import check_accounting

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path]) -> Iterator[Engine]:
    config = EngineConfig(
        str(folders["gqa2_tied_hub"]), dtype="float32", kv_cache_bytes=1 << 22, max_num_seqs=8
    )
    with Engine(config) as built:
        yield built
        assert not built.has_unfinished
        check_accounting(built._scheduler)
        assert built.stats().free_blocks == built.stats().num_blocks


def complete(
    engine: Engine, prompt: Any = PROMPT, params: SamplingParams = GREEDY, **changes: Any
) -> Completion:
    (completion,) = engine.generate([prompt], replace(params, **changes))
    return completion


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InvalidPrompt, "empty"),
        (None, InvalidPrompt, "string or a list of token ids, got NoneType"),
        ([1, True], InvalidPrompt, "integers, got True"),
        ([1, "2"], InvalidPrompt, "integers, got '2'"),
        ([1, 512], InvalidPrompt, "512 is outside the vocabulary of 512"),
        ("half \ud800 of a pair", InvalidPrompt, "Unicode"),
        ([1] * 512, PromptTooLong, "512 tokens; this engine takes 511"),
        ("x" * 1_000_000, PromptTooLong, "1000000 characters"),
    ],
)
def test_a_bad_prompt_fails_alone(
    shared: Engine, prompt: Any, error: type[Exception], message: str
) -> None:
    """`add` raises and changes nothing; `generate` answers with an error and completes the neighbours."""
    with pytest.raises(error, match=message):
        shared.add("bad", prompt, GREEDY)
    assert not shared.has_unfinished
    before, bad, after = shared.generate([PROMPT, prompt, PROMPT], GREEDY)
    assert bad.finish_reason == "error"
    assert message.split("|")[0] in (bad.error or "")
    assert before.token_ids == after.token_ids == complete(shared).token_ids


WIDTHS = sorted(
    {sign * 2**bits + off for bits in range(0, 81, 4) for sign in (1, -1) for off in (-1, 0, 1)}
)


@pytest.mark.parametrize("name", [*RANGES, "stop_token_ids"])
def test_a_number_of_any_width_is_refused_by_name_or_used(shared: Engine, name: str) -> None:
    """What the door lets in makes no step raise: an answer comes for it, and for its neighbours."""
    allowed = RANGES.get(name, TOKEN_ID)
    low, high = allowed.low, allowed.high
    accepted: list[SamplingParams] = []
    for width in (*WIDTHS, 10**400, 1e39, 1e300, 5e-324, math.inf, math.nan):
        values: dict[str, Any] = {"seed": 1, "stop_token_ids": [3]}
        if name == "thinking_token_budget":
            values["reasoning_marks"] = ["<think>", "</think>"]
        values["max_tokens"] = 2 if name != "min_tokens" else RANGES["max_tokens"].high
        values[name] = [width] if name == "stop_token_ids" else width
        is_of_kind = type(width) is int or not allowed.integer
        is_zero = width == 0 and name in ("top_p", "truncate_prompt_tokens")
        if low <= width <= high and is_of_kind and not is_zero:
            accepted.append(SamplingParams.from_mapping(values))
        else:
            with pytest.raises(InvalidSampling, match=name):
                SamplingParams.from_mapping(values)
    few = [5] * (shared.max_model_len - 3)  # room for three tokens
    neighbour, *completions = shared.generate([PROMPT] + [few] * len(accepted), [GREEDY, *accepted])
    assert neighbour.token_ids == complete(shared).token_ids
    assert len(completions) == sum(params.n for params in accepted)
    refused = {completion.error for completion in completions} - {None}
    outside = {
        f"token id {w} of stop_token_ids is outside the vocabulary of 512"
        for w in WIDTHS
        if 512 <= w <= high
    }
    assert refused == (outside if name == "stop_token_ids" else set())


def test_every_kind_of_parameters_has_a_kind_of_request() -> None:
    assert [kind.params for kind in ALL_KINDS] == list(KINDS.values())


def test_parameters_of_no_kind_are_refused(shared: Engine) -> None:
    message = "params must be one of SamplingParams, .*, ClassParams, got dict"
    with pytest.raises(InvalidSampling, match=message):
        shared.add("it", PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(InvalidSampling, match=message):
        shared.prepare(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_chats_tools_are_parameters_of_generation_alone() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert request_params("generate", {}, tools=tools).tools == tuple(tools)  # type: ignore[union-attr]
    continuations = {"continuations": ["a"]}
    assert request_params("score", continuations, tools=tools) == ScoringParams(["a"])


def test_a_request_id_is_used_once_at_a_time(shared: Engine) -> None:
    shared.add("same", PROMPT, GREEDY)
    with pytest.raises(DuplicateRequest, match="'same' is unfinished"):
        shared.add("same", PROMPT, GREEDY)
    shared.abort("same")
    shared.add("same", PROMPT, GREEDY)
    shared.abort("same")


def test_abort_frees_all_samples_and_returns_nothing_more(shared: Engine) -> None:
    """Waiting and running samples alike; an unknown id is left alone."""
    expected = complete(shared).token_ids
    shared.add("gone", PROMPT * 5, replace(GREEDY, n=12))
    shared.add("stays", PROMPT, GREEDY)
    done = shared.step()
    shared.abort("gone")
    shared.abort("gone")
    shared.abort("never added")
    while shared.has_unfinished:
        done += shared.step()
    assert [(completion.request_id, completion.token_ids) for completion in done] == [
        ("stays", expected)
    ]
    assert shared.step() == []


def test_generate_keeps_the_input_order_for_any_iterable(shared: Engine) -> None:
    """A generator of prompts and one of params, n samples together, lengths mixed."""
    rng = random.Random(3)
    lengths = [rng.randrange(1, 20) for _ in range(50)]
    params = [replace(GREEDY, max_tokens=n, n=1 + n % 2) for n in lengths]
    completions = shared.generate(([9] * n for n in lengths), iter(params))
    expected = [(n, index) for n in lengths for index in range(1 + n % 2)]
    assert [(len(c.token_ids), c.index) for c in completions] == expected
    assert [c.num_prompt_tokens for c in completions] == [n for n, _ in expected]
    assert shared.generate([]) == []


def test_the_progress_bar_counts_each_request_once(
    shared: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The samples of a request end in one step, in which it was counted twice."""
    params = SamplingParams(max_tokens=2, n=2, ignore_eos=True)
    shared.generate([[5, 6, 7], [8, 9]], params, use_tqdm=True)
    assert "2/2 [" in capsys.readouterr().err


def test_generate_refuses_what_it_cannot_pair(shared: Engine) -> None:
    with pytest.raises(InvalidPrompt, match="put a single one into a list"):
        shared.generate("one prompt", GREEDY)
    with pytest.raises(InvalidRequest, match="as many prompts as params"):
        shared.generate([PROMPT, PROMPT], [GREEDY])
    assert not shared.has_unfinished
    shared.add("other", PROMPT, GREEDY)
    with pytest.raises(EngineBusy, match="1 requests are unfinished"):
        shared.generate([PROMPT], GREEDY)
    shared.abort("other")


def test_max_tokens_and_the_model_length_end_with_length(shared: Engine) -> None:
    assert complete(shared, max_tokens=5).finish_reason == "length"
    long = complete(shared, [9] * 505, max_tokens=50)
    assert (len(long.token_ids), long.finish_reason) == (7, "length")


def test_stop_tokens_end_a_completion_and_stay_in_its_ids(shared: Engine) -> None:
    """stop_token_ids at once; the model's end tokens unless ignored; neither before min_tokens."""
    free = complete(shared).token_ids
    at = max(free.index(token_id) for token_id in free[:8])
    stopped = complete(shared, stop_token_ids=[free[at]])
    assert (stopped.token_ids, stopped.finish_reason) == (free[: at + 1], "stop")
    late = complete(shared, stop_token_ids=[free[at]], min_tokens=8)
    assert late.token_ids[:at] == free[:at]
    assert free[at] not in late.token_ids[:8]
    assert len(late.token_ids) > 8


def test_end_tokens_come_from_the_generation_config(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """A list there wins over config.json; its sampling defaults are not used."""
    source = folders["gqa2_bias"]
    with Engine(EngineConfig(str(source), kv_cache_bytes=1 << 22)) as built:
        free = complete(built).token_ids
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(
        f'{{"eos_token_id": [1, {free[3]}], "temperature": 5.0, "do_sample": true, "max_new_tokens": 1}}'
    )
    with Engine(EngineConfig(str(tmp_path), kv_cache_bytes=1 << 22)) as built:
        stopped = complete(built, ignore_eos=False)
        assert (stopped.token_ids, stopped.finish_reason) == (
            free[: free.index(free[3]) + 1],
            "stop",
        )
        assert complete(built).token_ids == free


def test_the_tokenizers_end_token_ends_a_text_beside_those_of_the_configuration(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As in vLLM: a chat's end is often named by the tokenizer alone."""
    source = folders["gqa2_bias"]
    with Engine(EngineConfig(str(source), kv_cache_bytes=1 << 22)) as built:
        free = complete(built).token_ids
        text_of_end = built._tokenizer.backend.id_to_token(free[3])
    for file in source.iterdir():
        if file.name not in ("tokenizer_config.json", "generation_config.json"):
            (tmp_path / file.name).symlink_to(file)
    names = json.loads((source / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": text_of_end}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[5]]}))
    with Engine(EngineConfig(str(tmp_path), kv_cache_bytes=1 << 22)) as built:
        end_token_ids = built._sequences.eos_token_ids
        stopped = complete(built, ignore_eos=False)
    assert end_token_ids == {free[5], free[3]}
    first_end = min(free.index(free[3]), free.index(free[5]))
    assert (stopped.token_ids, stopped.finish_reason) == (free[: first_end + 1], "stop")


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_ids(shared: Engine) -> None:
    """The text ends before it; the ids end with the token that completed it; one or many strings."""
    free = complete(shared, "The quick", max_tokens=40)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    stopped = complete(shared, "The quick", max_tokens=40, stop=[stop, "never there"])
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 40
    late = complete(shared, "The quick", max_tokens=40, stop=stop, min_tokens=38)
    assert len(late.token_ids) > 38


def test_the_chat_template_ends_with_the_generation_prompt(shared: Engine) -> None:
    token_ids = shared.chat_token_ids([{"role": "user", "content": "hi"}])
    assert shared._tokenizer.decode(token_ids) == "user\nhi\nassistant\n"
    for messages in ("hi", [], ["hi"], [{"content": "hi"}]):
        with pytest.raises(InvalidPrompt):
            shared.chat_token_ids(messages)  # type: ignore[arg-type]


def test_a_closed_engine_says_so(folder: Path) -> None:
    built = Engine(EngineConfig(str(folder), kv_cache_bytes=1 << 22))
    assert built.model_name == str(folder)
    built.add("a", PROMPT, GREEDY)
    built.close()
    built.close()
    assert not built.has_unfinished
    for call in (
        lambda: built.add("b", PROMPT, GREEDY),
        built.step,
        lambda: built.generate([PROMPT], GREEDY),
    ):
        with pytest.raises(EngineClosed):
            call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 1000000, got -1"),
        ({"temperature": "0"}, "without quotes"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"stop": ["a", ""]}, "1 to 1024 characters, got 0"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"structured_outputs": {}}, "must have one of json"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number and no text"),
        ({"logit_bias": {"a": 1}}, "a key of logit_bias must be a token id, got 'a'"),
        ({"logit_bias": {True: 1}}, "a key of logit_bias must be a token id, got True"),
        (
            {"logit_bias": {"5": 100.5}},
            "a bias of logit_bias must be between -100 and 100, got 100.5",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of token ids"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false, got 1"),
        ({"stop": ["a"] * 65}, "at most 64"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids must be an integer, got True"),
        ({"allowed_token_ids": [[1]]}, "allowed_token_ids must be an integer"),
        ({"bad_words": "word"}, "bad_words must be a list of strings"),
        ({"bad_words": ["a"] * 1025}, "bad_words holds 1025 strings; at most 1024"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves nothing"),
        ({"stop": "\ud800"}, "a stop string is no valid Unicode"),
        ({"min_tokens": False}, "min_tokens must be an integer, got False"),
        (
            {"stop": {"secret": "x" * 1000}},
            "stop must be a string or a list of strings, got .{0,60}$",
        ),
        (
            {"max_token": 5},
            r"'max_token' is no sampling parameter; did you mean max_tokens\? accepted are",
        ),
    ],
)
def test_bad_sampling_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSampling, match=message):
        SamplingParams.from_mapping(values)


def test_sampling_values_are_taken_as_they_come_from_json() -> None:
    params = SamplingParams.from_mapping(
        {"stop": "x", "stop_token_ids": [3], "temperature": 0, "top_k": 0}
    )
    assert params == SamplingParams(stop=("x",), stop_token_ids=(3,), temperature=0, top_k=0)
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_equal_values_of_other_types_are_told_apart_by_a_reader_that_remembers() -> None:
    assert SamplingParams.from_mapping({"max_tokens": 1, "temperature": 1}).max_tokens == 1
    assert SamplingParams.from_mapping({"max_tokens": 1, "temperature": 1.0}).max_tokens == 1
    for values in ({"max_tokens": True, "temperature": 1}, {"max_tokens": 1, "temperature": True}):
        with pytest.raises(InvalidSampling, match="must be a"):
            SamplingParams.from_mapping(values)
    with pytest.raises(InvalidSampling, match="max_tokens must be an integer"):
        SamplingParams.from_mapping({"max_tokens": 1.0, "temperature": 1})
