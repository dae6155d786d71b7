"""Embeddings: what transformers' hidden states give, pooled as sentence-transformers pools them."""

import json
import random
import shutil
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from torch import Tensor

from engine import (
    ConfigError,
    Engine,
    EngineBusy,
    EngineConfig,
    InvalidSampling,
    PoolingParams,
    PromptTooLong,
    SamplingParams,
    ScoringParams,
    UnsupportedTask,
)
from engine.checkpoint.pooling import MODES
from jobs.errors import InvalidJob, RequestFailed, ResultTooLarge
from tests.engine.accounting import check_accounting
from tests.engine.embedding_models import QUERY, Truth, like_qwen3_embedding, llama_body
from tests.engine.test_labels import CONTEXT, run
from tests.jobs.answering import opened_task

WORDS = ["The quick", " brown", " fox", " März", " 1987", " ångström", " jugs", " Œuvre"]
TEXTS = ["", "a", "☃ ü", *("".join(random.Random(i).choices(WORDS, k=3 * i)) for i in range(1, 11))]


def config(folder: Path, **options: Any) -> EngineConfig:
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_bytes": 2**19}
    return EngineConfig(str(folder), **{"dtype": "float32", "device": "cpu", **small, **options})


@pytest.fixture(scope="module")
def last_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return like_qwen3_embedding(tmp_path_factory.mktemp("last_token"))


@pytest.fixture(scope="module")
def all_modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_body(tmp_path_factory.mktemp("all_modes"), list(MODES))


@pytest.fixture(scope="module")
def embedding(last_token: Path) -> Iterator[Engine]:
    with Engine(config(last_token, async_scheduling=True)) as built:
        yield built
        check_accounting(built._scheduler)
        assert built.stats().free_blocks == built.stats().num_blocks


@pytest.fixture(scope="module")
def truth(last_token: Path) -> Truth:
    return Truth(last_token)


def normalized(vector: Tensor) -> list[float]:
    return torch.nn.functional.normalize(vector, dim=0).tolist()


def of_last_token(truth: Truth, text: str, dimensions: int | None = None) -> list[float]:
    return normalized(truth.pooled(truth.token_ids(text, 128), "lasttoken")[:dimensions])


@pytest.mark.parametrize("overlap", [False, True])
def test_every_way_of_pooling_is_as_sentence_transformers_defines_it(
    all_modes: Path, overlap: bool
) -> None:
    """In chunks, several at once, texts that are cut among them; their vectors stand side by side."""
    truth = Truth(all_modes)
    with Engine(config(all_modes, async_scheduling=overlap)) as engine:
        found = engine.embed(TEXTS)
        stats = engine.stats()
        assert not engine._scheduler.blocks._by_hash, "what is hit by nobody stays in no cache"
        check_accounting(engine._scheduler)
    assert (stats.decode_tokens, stats.cached_tokens, stats.free_blocks) == (0, 0, stats.num_blocks)
    for text, completion in zip(TEXTS, found, strict=True):
        token_ids = truth.token_ids(text, 32)
        expected = torch.cat([truth.pooled(token_ids, mode) for mode in MODES])
        assert completion.embedding == pytest.approx(expected.tolist(), abs=1e-5)
        assert (completion.num_prompt_tokens, completion.token_ids) == (len(token_ids), [])
        assert (completion.finish_reason, completion.text) == ("stop", "")
    assert max(completion.num_prompt_tokens for completion in found) == 32


def test_the_last_tokens_state_shares_prefixes(embedding: Engine, truth: Truth) -> None:
    before = embedding.stats().cached_tokens
    found = embedding.embed(TEXTS, PoolingParams(prompt_name="query"))
    for text, completion in zip(TEXTS, found, strict=True):
        assert completion.embedding == pytest.approx(of_last_token(truth, QUERY + text), abs=1e-5)
        assert sum(number**2 for number in completion.embedding or ()) == pytest.approx(1)
    assert embedding.stats().cached_tokens - before > 100


@pytest.mark.parametrize(("pooling", "num_keys"), [("lasttoken", 2), ("mean", 0)])
def test_keys_of_shared_blocks_are_made_with_the_prompt(
    folder: Path, pooling: str, num_keys: int
) -> None:
    """Beside the engine's thread, which waits for none."""
    with Engine(config(folder, pooling=pooling, block_size=16)) as engine:
        assert len(engine.prepare([5] * 31 + [6] * 8, PoolingParams()).block_keys) == num_keys


def test_as_many_tokens_as_fit_are_all_that_the_model_takes(
    embedding: Engine, truth: Truth
) -> None:
    """No new token needs room behind them."""
    text, token_ids = "The quick brown fox " * 60, list(range(3, 203))
    params = PoolingParams(truncate_prompt_tokens=-1)
    of_text, of_ids = embedding.embed([text, token_ids], params)
    assert (of_text.num_prompt_tokens, of_ids.num_prompt_tokens) == (128, 128)
    assert of_text.embedding == pytest.approx(of_last_token(truth, text), abs=1e-5)
    assert of_ids.embedding == pytest.approx(
        normalized(truth.pooled(token_ids[:128], "lasttoken")), abs=1e-5
    )


def test_dimensions_cut_and_normalise(embedding: Engine, truth: Truth) -> None:
    (cut,) = embedding.embed(["a b c"], PoolingParams(dimensions=7))
    assert cut.embedding == pytest.approx(of_last_token(truth, "a b c", 7), abs=1e-5)
    (raw,) = embedding.embed(["a b c"], PoolingParams(normalize=False))
    assert raw.embedding == pytest.approx(
        truth.pooled(truth.token_ids("a b c", 128), "lasttoken").tolist(), abs=1e-5
    )
    (whole,) = embedding.embed(["a b c"], PoolingParams(dimensions=40))
    assert whole.embedding == embedding.embed(["a b c"])[0].embedding


def test_a_bad_text_fails_alone(embedding: Engine) -> None:
    long, surrogate, empty, good, exact = embedding.embed(
        [list(range(3, 132)), "\ud800", [], "a", list(range(3, 131))]
    )
    assert long.error is not None
    assert "129 tokens; this engine takes 128" in long.error
    assert "as the model and the KV pool allow): shorten it" in long.error
    assert surrogate.error is not None
    assert "no valid Unicode" in surrogate.error
    assert empty.error is not None
    assert "the prompt is empty" in empty.error
    assert good.error is None
    assert exact.error is None
    assert exact.num_prompt_tokens == 128
    with pytest.raises(PromptTooLong):
        embedding.add("a", list(range(3, 132)), PoolingParams())
    embedding.add("own", "a", PoolingParams())
    with pytest.raises(EngineBusy):
        embedding.embed(["a"])
    embedding.abort("own")
    with pytest.raises(InvalidSampling, match="prompt_name is for texts"):
        embedding.add("a", [5, 6], PoolingParams(prompt_name="query"))


def test_without_an_lm_head_nothing_is_generated(all_modes: Path) -> None:
    with Engine(config(all_modes)) as engine:
        for params in (SamplingParams(), ScoringParams(["a"])):
            with pytest.raises(UnsupportedTask, match="no LM head: it embeds"):
                engine.add("a", [5, 6, 7], params)
        with pytest.raises(UnsupportedTask, match="no LM head"):
            engine.prepare("a", ScoringParams([""]))
        embedded, generated = engine.generate(["a", "b"], [PoolingParams(), SamplingParams()])
        assert embedded.error is None
        assert generated.error is not None
        assert "no LM head" in generated.error


def test_a_checkpoint_without_pooling_embeds_when_told_how(folder: Path) -> None:
    with (
        Engine(config(folder)) as engine,
        pytest.raises(UnsupportedTask, match="no pooling configuration"),
    ):
        engine.embed(["a"])
    with Engine(config(folder, pooling="mean")) as engine:
        (found,) = engine.embed([[5, 6, 7]])
    expected = Truth(folder).pooled([5, 6, 7], "mean")
    assert found.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(ConfigError, match="pooling='median' is not known: use one of cls"):
        config(folder, pooling="median")


def changed(folder: Path, to: Path, name: str, **values: Any) -> Path:
    """A copy with other values in one of its JSON files."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    path = to / name
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**before, **values}))
    return to


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode": "attention"},
            "'attention'.*supported are cls, lasttoken",
        ),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": 8},
            "pools vectors of 8 numbers, .* have 48",
        ),
        (
            "sentence_bert_config.json",
            {"do_lower_case": True},
            "do_lower_case True is not supported",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "'q' is none of"),
    ],
)
def test_what_is_not_built_is_refused_at_start(
    all_modes: Path, tmp_path: Path, name: str, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(config(changed(all_modes, tmp_path, name, **values)))


@pytest.mark.parametrize("asked", ["The quick", ["The quick"], [5, 6, 7], [[5, 6, 7], "brown", ""]])
def test_it_is_openais_list_in_either_encoding(embedding: Engine, asked: Any) -> None:
    prompts = asked if isinstance(asked, list) and not isinstance(asked[0], int) else [asked]
    expected = [each.embedding for each in embedding.embed(prompts)]
    found = run(embedding, "jobs.embed", asked)
    read = CreateEmbeddingResponse.model_validate(found, strict=True)
    assert [each.embedding for each in read.data] == [
        pytest.approx(each, abs=1e-5) for each in expected
    ]
    assert [each.index for each in read.data] == list(range(len(prompts)))
    assert (read.object, read.model, read.data[0].object) == ("list", "m", "embedding")
    num_tokens = sum(each.num_prompt_tokens for each in embedding.embed(prompts))
    assert read.usage.prompt_tokens == read.usage.total_tokens == num_tokens
    packed_ones = run(
        embedding, "jobs.embed", input=asked, encoding_format="base64", user="someone"
    )["data"]
    decoded = [np.frombuffer(b64decode(each["embedding"]), "<f4").tolist() for each in packed_ones]
    assert decoded == [pytest.approx(each, abs=1e-5) for each in expected]


def test_one_that_fails_says_why_and_all_fail_the_job(embedding: Engine) -> None:
    good, long, surrogate = run(embedding, "jobs.embed", ["a", list(range(3, 203)), "\ud800"])[
        "data"
    ]
    assert len(good["embedding"]) == 40
    assert "error" not in good
    assert (long["embedding"], surrogate["embedding"]) == ([], [])
    assert "200 tokens; this engine takes 128" in long["error"]
    assert "surrogate" in surrogate["error"]
    with pytest.raises(RequestFailed, match="embeddings have 40"):
        run(embedding, "jobs.embed", ["a"], dimensions=41)


def test_a_result_that_is_too_large_is_given_up(embedding: Engine) -> None:
    task = opened_task(replace(CONTEXT, max_result_bytes=199), "jobs.embed", ("a",), {})
    list(task.requests())
    with pytest.raises(ResultTooLarge):
        task.deliver(0, embedding.embed(["a"]))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"input": None}, "prompt is NoneType, expected a string"),
        ({"input": []}, "empty list"),
        ({"input": "a", "dimensions": "8"}, "dimensions:=8"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format is 'int8', expected 'float'"),
        ({"input": "a", "temperature": 0}, "'temperature' is no argument of jobs.embed"),
    ],
)
def test_wrong_arguments_are_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidJob, match=problem):
        opened_task(CONTEXT, "jobs.embed", (), values)
