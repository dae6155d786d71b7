"""Sampling values as requests bring them: refused by name, or taken as JSON has them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from engine import (
    InvalidSampling,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 1000000, got -1"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "0"}, "without quotes"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"n": 10_000}, "n must be between 1 and"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ["a", ""]}, "1 to 1024 characters, got 0"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"structured_outputs": {}}, "must have one of json"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be a number and no text"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "a key of logit_bias must be a token id, got 'a'"),
        ({"logit_bias": {True: 1}}, "a key of logit_bias must be a token id, got True"),
        ({"logit_bias": {"5": 100.5}}, "a bias of logit_bias must be between -100 and 100, got 100.5"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list of token ids"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false, got 1"),
        ({"stop": ["a"] * 65}, "at most 64"),
        ({"allowed_token_ids": [1, True]}, "allowed_token_ids must be an integer, got True"),
        ({"allowed_token_ids": [[1]]}, "allowed_token_ids must be an integer"),
        ({"bad_words": "word"}, "bad_words must be a list of strings"),
        ({"bad_words": ["a"] * 1025}, "bad_words holds 1025 strings; at most 1024"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves nothing"),
        ({"temperature": 10**400}, "temperature must be between 0 and 1000000, got 1000"),
        ({"stop": "\ud800"}, "a stop string is no valid Unicode"),
        ({"min_tokens": False}, "min_tokens must be an integer, got False"),
        ({"stop": {"secret": "x" * 1000}}, "stop must be a string or a list of strings, got .{0,60}$"),
        ({"max_token": 5}, r"'max_token' is no sampling parameter; did you mean max_tokens\? accepted are"),
    ],
)
def test_bad_sampling_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSampling, match=message):
        SamplingParams.from_mapping(values)


def test_sampling_values_are_taken_as_they_come_from_json() -> None:
    params = SamplingParams.from_mapping({"stop": "x", "stop_token_ids": [3], "temperature": 0, "top_k": 0})
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
