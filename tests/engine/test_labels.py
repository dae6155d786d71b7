"""Labels: probabilities are the softmax of transformers' log-likelihoods, and little is computed for them."""

import random
from collections.abc import Iterator, Sequence
from math import exp, fsum
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, InvalidPrompt, InvalidSampling, PromptTooLong, ScoringParams
from jobs.context import JobContext
from jobs.errors import InvalidJob, RequestFailed
from jobs.prompts.scoring.ranking import RERANK_PROMPT
from tests.engine.accounting import check_accounting
from tests.engine.checkpoints import make_tokenizer
from tests.engine.test_logprobs import NAME, config
from tests.jobs.answering import MODEL, opened_task
from worker.stock_worker import drive

TOKENIZER = make_tokenizer()
END = TOKENIZER.eos_token_id
ROOMY = {
    "kv_cache_bytes": None,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_model_len": 400,
}
CONTEXT = JobContext(None, "q", "j", "e", (), MODEL)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def roomy(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(config(folders[NAME], **ROOMY)) as built:
        yield built
        check_accounting(built._scheduler)
        assert built.stats().free_blocks == built.stats().num_blocks


def likelihood(truth: Any, context: Sequence[int], continuation: Sequence[int]) -> float:
    rows = truth((*context, *continuation))[len(context) - 1 : -1]
    return float(rows.double().gather(1, torch.tensor(continuation)[:, None]).sum())


def behind(truth: Any, text: str, length: int) -> float:
    """Of what stands behind the first tokens of a text, some of which may be no prompt's own."""
    ids = encoded(text)
    return likelihood(truth, ids[:length], ids[length:])


def whole_likelihoods(truth: Any, prompt: str, labels: Sequence[str]) -> list[float]:
    """Of the whole texts, from their first token on, behind the token that stands for an empty text if they need it."""
    wholes = [encoded(prompt + label) for label in labels]
    if len({ids[0] for ids in wholes}) == 1:
        return [likelihood(truth, ids[:1], ids[1:]) for ids in wholes]
    return [likelihood(truth, [END], ids) for ids in wholes]


def softmax(logprobs: Sequence[float]) -> list[float]:
    weights = [exp(each - max(logprobs)) for each in logprobs]
    return [each / fsum(weights) for each in weights]


def run(engine: Engine, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    task = opened_task(CONTEXT, name, args, kwargs)
    drive(task, engine)
    result = task.result()
    assert isinstance(result, dict)
    return result


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def finish(engine: Engine) -> dict[str, Any]:
    done = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


NASTY = [
    [7],
    [8],
    [8, 9],
    [8, 9, 10, 11, 12, 13],
    [8, 9, 10, 12],
    [14, 15],
    [14, 16, 17],
    [18] * 6,
    [8, 10],
]
APART = [[7], [8, 9], [8, 10, 11], [14, 15, 16, 17, 18, 19], [14, 15, 16, 20], [8, 10, 12]]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("labels", [NASTY, APART])
def test_probabilities_are_those_of_transformers(
    folders: dict[str, Path], truth: Any, labels: list[list[int]], overlap: bool
) -> None:
    """In mixed batches, preempted, in chunks; an end is scored where one label begins another."""
    rng = random.Random(8)
    prompts = [
        [rng.randrange(20, 500) for _ in range(length)] for length in (1, 15, 16, 17, 50, 64)
    ]
    end = [END] if labels is NASTY else []
    done = {}
    with Engine(config(folders[NAME], async_scheduling=overlap)) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(
                str(number), prompt, ScoringParams(labels, score_end="auto"), lane=number % 2
            )
            done |= {each.request_id: each for each in engine.step()}
        done |= finish(engine)
        assert engine.stats().free_blocks == engine.stats().num_blocks
        assert engine.stats().decode_tokens == 0
    for number, prompt in enumerate(prompts):
        completion = done[str(number)]
        assert (completion.finish_reason, completion.token_ids) == ("stop", [])
        assert completion.num_prompt_tokens == len(prompt)
        expected = [likelihood(truth, prompt, [*label, *end]) for label in labels]
        found = [each.logprob for each in completion.loglikelihoods]
        assert softmax(found) == pytest.approx(softmax(expected), abs=1e-5)
        assert [each.num_tokens for each in completion.loglikelihoods] == [
            len(label) + len(end) for label in labels
        ]


@pytest.mark.parametrize("length", [5, 16, 40])
def test_a_prompt_and_its_labels_are_computed_once(roomy: Engine, length: int) -> None:
    """Labels of one token cost nothing beside the prompt; others no more than their tree."""
    rng = random.Random(length)
    computed, tree = 0, 0
    for labels in (
        [[7], [8], [9], [10]],
        NASTY,
        [[rng.randrange(500) for _ in range(3)] for _ in range(20)],
    ):
        prompt = [rng.randrange(3, 500) for _ in range(length)]
        before = roomy.stats().prefill_tokens
        roomy.add("a", prompt, ScoringParams(labels))
        finish(roomy)
        computed += roomy.stats().prefill_tokens - before
        tree += length + len(
            {tuple(label[: i + 1]) for label in labels for i in range(len(label) - 1)}
        )
        if len(labels) == 4:
            assert computed == length, "of labels of one token the prompt alone is computed"
    assert computed <= 1.05 * tree


def test_a_classification_of_a_text(roomy: Engine, truth: Any) -> None:
    """The prompt's last space belongs to the labels, which are split into tokens with it."""
    labels = ["fox", "the quick brown fox", "dogs", "日本"]
    for prompt in ("The quick brown ", "The lazy dog:", "a", "Œuvre\n"):
        for _ in range(2):  # the second time the tails are remembered
            found = run(roomy, "jobs.classify", prompt, labels)
        ends = found["probabilities"]
        first = encoded(prompt.rstrip())
        expected = whole_likelihoods(truth, prompt, labels)
        assert list(ends.values()) == pytest.approx(softmax(expected), abs=1e-5)
        assert list(ends) == labels
        assert found["label"] == max(ends, key=ends.get)
        assert found["object"] == "classification"
        assert found["usage"]["prompt_tokens"] == len(first)
        assert found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt", "labels"),
    [
        ("over the br", ["e", "own", "ick"]),
        ("jumps over the ", ["own", "lazy dog"]),
        ("the quick bro", ["x", "wn"]),
        ("the th", ["e", "ere", "is"]),
        ("th", ["e", "ick"]),
    ],
)
def test_a_label_that_merges_with_the_prompts_end_has_the_probability_of_the_whole_text(
    roomy: Engine, truth: Any, prompt: str, labels: list[str]
) -> None:
    """It is scored from the first token at which any of the whole texts differ, which may lie within the prompt."""
    prompt_ids = encoded(prompt.rstrip())
    merged = [label for label in labels if encoded(prompt + label)[: len(prompt_ids)] != prompt_ids]
    assert merged or prompt.endswith(" "), "the case has lost its point"
    found = run(roomy, "jobs.classify", prompt, labels)
    expected = softmax(whole_likelihoods(truth, prompt, labels))
    assert list(found["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
    assert found["usage"]["prompt_tokens"] == len(prompt_ids)


def test_a_classification_of_a_chat_follows_its_generation_prompt(
    roomy: Engine, truth: Any
) -> None:
    messages = [{"role": "user", "content": "The quick brown fox"}]
    labels = ["yes", "no", "no no"]
    found = run(roomy, "jobs.classify", messages=messages, labels=labels, calibrate=True)

    def ids(messages: list[dict[str, str]]) -> list[int]:
        return TOKENIZER.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    free = [{"role": "user", "content": "N/A"}]
    own, prior = (
        [likelihood(truth, ids(each), [*encoded(label), END]) for label in labels]
        for each in (messages, free)
    )
    expected = softmax([a - b for a, b in zip(own, prior, strict=True)])
    assert list(found["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
    given = run(roomy, "jobs.classify", messages=messages, labels=labels, calibrate=free)
    assert given["probabilities"] == pytest.approx(found["probabilities"], abs=1e-6)


def test_a_ranking_sorts_documents_by_the_probability_of_yes(roomy: Engine, truth: Any) -> None:
    documents = ["The quick", "", "over and over", "far too long " * 200]
    found = run(roomy, "jobs.rerank", "the fox", documents, instruction="find it")
    scores = {}
    for index, document in enumerate(documents[:3]):
        prompt = RERANK_PROMPT.format(instruction="find it", query="the fox", document=document)
        likelihoods = [
            likelihood(truth, encoded(prompt), encoded(answer)) for answer in ("yes", "no")
        ]
        scores[index] = softmax(likelihoods)[0]
    assert [each["index"] for each in found["results"]] == [
        *sorted(scores, key=scores.get, reverse=True),
        3,
    ]
    for each in found["results"][:3]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
        assert each["document"] == {"text": documents[each["index"]]}
    assert found["results"][3]["relevance_score"] is None
    assert "takes 401" in found["results"][3]["error"]
    bare = run(
        roomy, "jobs.rerank", "the fox", [{"text": "a"}, "b"], top_n=1, return_documents=False
    )
    assert [set(each) for each in bare["results"]] == [{"index", "relevance_score"}]


def test_a_long_prompt_fails_or_is_truncated_from_its_beginning(roomy: Engine, truth: Any) -> None:
    long = "fox " * 500
    with pytest.raises(RequestFailed, match="takes 401"):
        run(roomy, "jobs.classify", long, ["a", "b"])
    ids = encoded(long.rstrip())
    found = run(roomy, "jobs.classify", long, ["a", "b"], truncate_prompt_tokens=7)
    expected = [likelihood(truth, ids[-7:], encoded(long + label)[len(ids) :]) for label in "ab"]
    assert list(found["probabilities"].values()) == pytest.approx(softmax(expected), abs=1e-5)
    assert found["usage"]["prompt_tokens"] == 7
    whole = run(roomy, "jobs.classify", long, ["a", "b"], truncate_prompt_tokens=-1)
    assert 390 < whole["usage"]["prompt_tokens"] < 401


def test_labels_that_are_the_same_tokens_fail_by_name(roomy: Engine) -> None:
    with pytest.raises(InvalidPrompt, match="continuations 0 and 2 are the same tokens"):
        roomy.add("a", [5], ScoringParams([[7], [8], [7]], score_end="auto"))
    with pytest.raises(InvalidPrompt, match="continuation 1 has no token"):
        roomy.add("a", [5], ScoringParams([[7], []]))
    with pytest.raises(InvalidPrompt, match="512 is outside"):
        roomy.add("a", [5], ScoringParams([[512]]))
    with pytest.raises(PromptTooLong):
        roomy.add("a", [5] * 401, ScoringParams([[7]]))
    assert not roomy.has_unfinished


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"continuations": []}, "is empty"),
        ({"continuations": [None]}, "continuation 0 must be a text"),
        ({"continuations": ["a"], "score_end": "yes"}, "score_end must be"),
        ({"continuations": ["a"], "truncate_prompt_tokens": 0}, "leaves nothing"),
        ({"continuations": ["a"], "n": 2}, "'n' is nothing that scoring takes"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSampling, match=message):
        ScoringParams.from_mapping(values)


CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("classify", {"prompt": "a"}, "labels is None, expected a list"),
        ("classify", {"prompt": "a", "labels": []}, "labels holds 0 values, expected 2 to 1000"),
        ("classify", {"prompt": "a", "labels": ["a", ""]}, "label 1 is empty"),
        ("classify", {"prompt": "a", "labels": ["a", "\ud800"]}, "surrogate"),
        (
            "classify",
            {"prompt": "a", "messages": CHAT, "labels": ["a", "b"]},
            "each say what to ask",
        ),
        (
            "classify",
            {"prompt": ["a", "b"], "labels": ["a", "b"]},
            "prompt is list, expected a string or",
        ),
        (
            "classify",
            {"prompt": "a", "labels": ["a", "b"], "max_tokens": 5},
            "'max_tokens' is no argument",
        ),
        (
            "classify",
            {"messages": CHAT, "labels": ["a", "b"], "calibrate": "a"},
            "messages without content",
        ),
        ("loglikelihood", {"prompt": "a", "continuations": "b"}, "expected a list"),
        ("loglikelihood", {"prompt": "a", "continuations": []}, "holds 0"),
        ("loglikelihood", {"prompt": "a", "continuations": [5]}, "continuation 0 is 5"),
        ("rerank", {"query": "a", "documents": "b"}, "documents is 'b'"),
        ("rerank", {"query": 5, "documents": ["b"]}, "query is int"),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "return_documents": "no"},
            "return_documents is 'no'",
        ),
        (
            "rerank",
            {"query": "a", "documents": ["b"] * 500, "instruction": "é" * 80_000},
            "bytes in all",
        ),
    ],
)
def test_a_job_of_what_cannot_be_is_refused_by_name(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        opened_task(CONTEXT, f"jobs.{name}", (), arguments)
