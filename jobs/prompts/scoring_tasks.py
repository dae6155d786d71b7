"""The tasks of `jobs.embed`, `classify`, `classify_text`, `loglikelihood` and `rerank`, which generate nothing."""

from array import array
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jobs.common.display import MAX_NAME_CHARS, brief
from jobs.context import JobContext
from jobs.context.served_model import parse_model
from jobs.context.values import listed, one_of, some_text, truth, whole_number
from jobs.errors import InvalidJob, InvalidValue, RequestFailed, check_limit, unlike
from jobs.prompts.arguments import (
    MAX_CHOICES,
    MAX_PROMPTS,
    Unusable,
    checked_text,
    one_prompt,
    parse_prompts,
    text_problem,
    without_neutral,
)
from jobs.prompts.labels import CONTENT_FREE, classify, parse_labels, scoring_of, truncation
from jobs.prompts.messages import NAMES as CHAT_NAMES
from jobs.prompts.messages import OF_VALUES, forces_call, normal_messages, split_chat_options
from jobs.prompts.pictures import pictured_task, pictures_in
from jobs.prompts.prompt_task import PromptTask, text_requests
from jobs.prompts.responses import Answers, usage
from jobs.prompts.templated_task import asked_task
from jobs.tasks import Completion, LateTask, Request, Task

ENCODINGS = ("float", "base64")

_POOLING: Mapping[str, Callable[[str, Any], Any]] = {
    "dimensions": whole_number,
    "normalize": truth,
    "prompt_name": partial(some_text, most=MAX_NAME_CHARS),
}


def embed_task(
    input: object, *, encoding_format: object = None, model: object = None, **others: Any
) -> PromptTask:
    asked_for = parse_model(model)
    given = {name: others.pop(name, None) for name in (*_POOLING, "truncate_prompt_tokens")}
    for name in without_neutral(others):
        raise InvalidValue("{} is no argument of jobs.embed", brief(name))
    encoding = (
        ENCODINGS[0]
        if encoding_format is None
        else one_of("encoding_format", encoding_format, ENCODINGS)
    )
    requests = text_requests(parse_prompts(input), pooling_values(**given), kind="embed")
    return PromptTask(requests, partial(_embeddings, is_base64=encoding == "base64"), asked_for)


def pooling_values(*, truncate_prompt_tokens: object = None, **given: Any) -> dict[str, Any]:
    """Return the values of a request for an embedding; see engine.PoolingParams. Raises InvalidJob."""
    values = {
        name: _POOLING[name](name, value) for name, value in given.items() if value is not None
    }
    return {**values, **truncation(truncate_prompt_tokens)}


def _embeddings(answers: Answers, job_id: str, *, is_base64: bool) -> dict[str, Any]:
    num_tokens = usage(answers)["prompt_tokens"]
    return {
        "object": "list",
        "data": [
            _entry(index, answer.first, is_base64=is_base64) for index, answer in enumerate(answers)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _entry(index: int, sample: Completion, *, is_base64: bool) -> dict[str, Any]:
    numbers = sample.embedding or ()
    # nine digits are all that a float32 has, and half of what is written otherwise
    shown_numbers = (
        b64encode(array("f", numbers)).decode()
        if is_base64
        else [float(f"{x:.9g}") for x in numbers]
    )
    entry = {"object": "embedding", "index": index, "embedding": shown_numbers}
    return entry if sample.error is None else {**entry, "error": sample.error}


#: What Qwen3-Reranker's model card puts around a query and a document.
RERANK_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_LABELS = ("yes", "no")

NO_RELEVANCE = "its labels have no finite log-likelihood"
#: Of all prompts of a reranking together: query and instruction stand before each document.
MAX_RERANK_BYTES = 1 << 26


def classify_task(
    prompt: object = None,
    labels: object = None,
    *,
    calibrate: object = None,
    truncate_prompt_tokens: object = None,
    model: object = None,
    **options: Any,
) -> Task:
    asked_for, found = parse_model(model), parse_labels("labels", labels)
    values = scoring_of(found, truncate_prompt_tokens)
    given = {
        name: options.pop(name, None)
        for name in ("messages", "prompt_template", "messages_template")
    }
    if forces_call(options):
        raise InvalidValue(
            "tool_choice is {}, and jobs.classify generates nothing", brief(options["tool_choice"])
        )
    _, template = split_chat_options(options)

    def task(kind: str, asked: object) -> Task:
        is_chat = kind == "messages"
        for name in options.keys() - set(CHAT_NAMES if is_chat else (OF_VALUES,)):
            raise InvalidValue("{} is no argument of jobs.classify", brief(name))

        def made(asked: Any) -> PromptTask:
            both = [asked]
            if calibrate is not False and calibrate is not None:
                both.append(_content_free(asked, calibrate, is_chat=is_chat))
            if is_chat:
                requests = [Request(None, each, values, template, kind="score") for each in both]
            else:
                requests = [
                    Request(one_prompt(each, "prompt"), None, values, kind="score") for each in both
                ]
            if len(requests) > 1 and any(pictures_in(each.messages or []) for each in requests):
                raise InvalidJob(
                    "calibrate and pictures do not go together: no picture has no content"
                )
            return PromptTask(requests, partial(_classification, labels=found), asked_for)

        return pictured_task(normal_messages(asked), made) if is_chat else made(asked)

    return asked_task(task, values_are_text=template.get(OF_VALUES, True), prompt=prompt, **given)


def loglikelihood_task(
    prompt: object,
    continuations: object,
    *,
    truncate_prompt_tokens: object = None,
    model: object = None,
) -> PromptTask:
    asked_for, found = parse_model(model), _continuations(continuations)
    values = {"continuations": found, **truncation(truncate_prompt_tokens)}
    request = Request(one_prompt(prompt, "prompt"), None, values, kind="score")
    return PromptTask([request], partial(_loglikelihood, continuations=found), asked_for)


def rerank_task(
    query: object,
    documents: object,
    *,
    instruction: object = None,
    top_n: object = None,
    return_documents: object = True,
    model: object = None,
) -> Task:
    asked_for = parse_model(model)
    asked = checked_text(query, "query")
    told = checked_text(RERANK_INSTRUCTION if instruction is None else instruction, "instruction")
    texts = _documents(documents)
    before = RERANK_PROMPT.format(instruction=told, query=asked, document="")
    what = f"query and instruction stand before each of {len(texts)} documents, {{}} bytes in all"
    remedy = "shorten them, or make several jobs of the documents"
    check_limit(len(before.encode()) * len(texts), MAX_RERANK_BYTES, what, remedy)
    most = None if top_n is None else whole_number("top_n", top_n)
    shown = texts if truth("return_documents", return_documents) else None

    def task(context: JobContext) -> PromptTask:
        context.model.check_ranks()
        requests = [
            relevance_request(asked, text, bool(context.model.classes), told) for text in texts
        ]
        return PromptTask(requests, partial(_ranking, documents=shown, top_n=most), asked_for)

    return LateTask(task)


def relevance_request(
    query: str, document: str, has_head: bool, instruction: str = RERANK_INSTRUCTION
) -> Request | Unusable:
    if has_head:
        return Request(query, None, {"pair": document}, kind="classify")
    asked = RERANK_PROMPT.format(instruction=instruction, query=query, document=document)
    if problem := text_problem(asked, "the prompt of query and document"):
        return Unusable(problem)
    return Request(asked, None, scoring_of(RERANK_LABELS), kind="score")


def relevance(sample: Completion) -> float | None:
    if sample.class_scores is not None:
        return next(iter(sample.class_scores.values()))
    found = classify(RERANK_LABELS, [each.logprob for each in sample.loglikelihoods or ()])
    return None if found is None else found.probabilities["yes"]


def classify_text_task(
    input: object, *, truncate_prompt_tokens: object = None, model: object = None
) -> Task:
    asked_for = parse_model(model)
    requests = text_requests(
        parse_prompts(input), truncation(truncate_prompt_tokens), kind="classify"
    )
    return PromptTask(requests, _classes, asked_for)


def best_class(scores: Mapping[str, float]) -> str | None:
    return max(scores, key=scores.__getitem__) if len(scores) > 1 else None


def _classes(answers: Answers, job_id: str) -> dict[str, Any]:
    data = [_class_entry(index, answer.first) for index, answer in enumerate(answers)]
    return {"object": "list", "data": data, "usage": usage(answers)}


def _class_entry(index: int, sample: Completion) -> dict[str, Any]:
    entry = {"object": "classification", "index": index}
    if sample.class_scores is None:
        return {**entry, "error": sample.error}
    if (label := best_class(sample.class_scores)) is None:
        return {**entry, "score": next(iter(sample.class_scores.values()))}
    probabilities = dict(sample.class_scores)
    return {**entry, "label": label, "score": probabilities[label], "probabilities": probabilities}


def _classification(answers: Answers, job_id: str, labels: Sequence[str]) -> dict[str, Any]:
    logprobs = [_logprobs(number, answer.first) for number, answer in enumerate(answers)]
    found = classify(labels, *logprobs)
    if found is None:
        raise RequestFailed(
            0, "a label has no finite log-likelihood: its probability cannot be told"
        )
    return {
        "object": "classification",
        "label": found.label,
        "probabilities": dict(found.probabilities),
        "usage": usage(answers),
    }


def _loglikelihood(
    answers: Answers, job_id: str, continuations: Sequence[str | list[int]]
) -> dict[str, Any]:
    likelihoods = answers[0].first.loglikelihoods
    assert likelihoods is not None, "an answer without what was asked for"
    return {
        "object": "loglikelihood",
        "choices": [
            {
                "index": index,
                "text": asked if isinstance(asked, str) else None,
                "logprob": found.logprob,
                "num_tokens": found.num_tokens,
                "is_greedy": found.is_greedy,
            }
            for index, (asked, found) in enumerate(zip(continuations, likelihoods, strict=True))
        ],
        "usage": usage(answers),
    }


def _ranking(
    answers: Answers, job_id: str, documents: Sequence[str] | None, top_n: int | None
) -> dict[str, Any]:
    results = [_result(number, answer.first, documents) for number, answer in enumerate(answers)]
    results.sort(key=_rank)
    return {"object": "rerank", "results": results[:top_n], "usage": usage(answers)}


def _rank(result: Mapping[str, Any]) -> tuple[bool, float]:
    """Order results by falling relevance. Results without one come last, however low the others are."""
    score = result["relevance_score"]
    return (True, 0.0) if score is None else (False, -score)


def _result(number: int, sample: Completion, documents: Sequence[str] | None) -> dict[str, Any]:
    result: dict[str, Any] = {"index": number, "relevance_score": None}
    if documents is not None:
        result["document"] = {"text": documents[number]}
    if sample.error is not None:
        return {**result, "error": sample.error}
    score = relevance(sample)
    return (
        {**result, "error": NO_RELEVANCE} if score is None else {**result, "relevance_score": score}
    )


def _logprobs(number: int, sample: Completion) -> list[float]:
    if sample.loglikelihoods is None:
        raise RequestFailed(number, sample.error or "the engine gave no reason")
    return [each.logprob for each in sample.loglikelihoods]


def _continuations(continuations: object) -> list[str | list[int]]:
    found: list[str | list[int]] = []
    for number, each in enumerate(
        listed("continuations", continuations, "a list of texts", 1, MAX_CHOICES)
    ):
        if not each or not isinstance(each, str | list):
            raise unlike(
                f"continuation {number}", each, "a text or a list of token ids, and not empty"
            )
        found.append(one_prompt(each, f"continuation {number}"))
    return found


def _content_free(asked: Any, calibrate: object, *, is_chat: bool) -> object:
    if calibrate is True:
        if not is_chat:
            return CONTENT_FREE
        *before, last = asked  # in which the last one says nothing
        return [*before, {**last, "content": CONTENT_FREE}]
    if not isinstance(calibrate, list if is_chat else str):
        kind = "messages" if is_chat else "a prompt"
        raise unlike("calibrate", calibrate, f"true, false, or {kind} without content")
    return normal_messages(calibrate) if is_chat else calibrate


def _documents(documents: object) -> list[str]:
    texts = []
    for number, each in enumerate(
        listed("documents", documents, "a list of texts", 1, MAX_PROMPTS)
    ):
        text = each["text"] if isinstance(each, dict) and each.keys() == {"text"} else each
        texts.append(checked_text(text, f"document {number}"))
    return texts
