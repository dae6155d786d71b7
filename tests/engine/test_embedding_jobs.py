"""jobs.embed: OpenAI's shape, as its own client's types read it, with what the engine gives."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from engine import Engine
from jobs.errors import InvalidJob, RequestFailed, ResultTooLarge
from tests.engine.embedding_models import like_qwen3_embedding
from tests.engine.test_embeddings import config
from tests.engine.test_labels import CONTEXT, run
from tests.jobs.answering import opened_task


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(config(like_qwen3_embedding(tmp_path_factory.mktemp("embedding")))) as built:
        yield built


@pytest.mark.parametrize("asked", ["The quick", ["The quick"], [5, 6, 7], [[5, 6, 7], "brown", ""]])
def test_it_is_openais_list_in_either_encoding(engine: Engine, asked: Any) -> None:
    prompts = asked if isinstance(asked, list) and not isinstance(asked[0], int) else [asked]
    expected = [each.embedding for each in engine.embed(prompts)]
    found = run(engine, "jobs.embed", asked)
    read = CreateEmbeddingResponse.model_validate(found, strict=True)
    assert [each.embedding for each in read.data] == [pytest.approx(each, abs=1e-5) for each in expected]
    assert [each.index for each in read.data] == list(range(len(prompts)))
    assert (read.object, read.model, read.data[0].object) == ("list", "m", "embedding")
    assert read.usage.prompt_tokens == read.usage.total_tokens == engine_tokens(engine, prompts)
    packed_ones = run(engine, "jobs.embed", input=asked, encoding_format="base64", user="someone")["data"]
    decoded = [np.frombuffer(b64decode(each["embedding"]), "<f4").tolist() for each in packed_ones]
    assert decoded == [pytest.approx(each, abs=1e-5) for each in expected]


def engine_tokens(engine: Engine, prompts: list[Any]) -> int:
    return sum(each.num_prompt_tokens for each in engine.embed(prompts))


def test_one_that_fails_says_why_and_all_fail_the_job(engine: Engine) -> None:
    good, long, surrogate = run(engine, "jobs.embed", ["a", list(range(3, 203)), "\ud800"])["data"]
    assert len(good["embedding"]) == 40
    assert "error" not in good
    assert (long["embedding"], surrogate["embedding"]) == ([], [])
    assert "200 tokens; this engine takes 128" in long["error"]
    assert "surrogate" in surrogate["error"]
    with pytest.raises(RequestFailed, match="embeddings have 40"):
        run(engine, "jobs.embed", ["a"], dimensions=41)


def test_a_result_that_is_too_large_is_given_up(engine: Engine) -> None:
    task = opened_task(replace(CONTEXT, max_result_bytes=199), "jobs.embed", ("a",), {})
    list(task.requests())
    with pytest.raises(ResultTooLarge):
        task.deliver(0, engine.embed(["a"]))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"input": None}, "input is missing"),
        ({"input": []}, "empty list"),
        ({"input": "a", "dimensions": "8"}, "dimensions:=256"),
        (
            {"input": "a", "encoding_format": "int8"},
            "encoding_format is 'int8', expected 'float'",
        ),
        ({"input": "a", "temperature": 0}, "'temperature' is no argument of jobs.embed"),
    ],
)
def test_wrong_arguments_are_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob, match=problem):
        opened_task(CONTEXT, "jobs.embed", (), values)
