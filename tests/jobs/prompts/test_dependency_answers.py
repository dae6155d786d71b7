"""Prompts that are templates over the answers of the jobs that a job depends on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Dependency, Job
from rq.results import Result

from jobs.common.rq_jobs import NO_JSON_VALUE
from jobs.context import JobContext
from jobs.errors import AnswerMissing, InvalidJob
from jobs.prompts.templated_task import MAX_READ_AT_ONCE, answer_of
from jobs.table import task_of
from tests.jobs.answering import FakeCompletion, opened_task, refuse, run_task

Ended = Callable[..., Job]


@pytest.fixture
def ended(queue: Queue) -> Ended:
    """Makes jobs that have ended so, as RQ notes it."""

    def make(value: Any = None, kind: Result.Type = Result.Type.SUCCESSFUL) -> Job:
        job = queue.enqueue("jobs.complete", "x")
        job.set_status("finished" if kind is Result.Type.SUCCESSFUL else "failed")
        Result.create(job, kind, ttl=500, return_value=value)
        return job

    return make


@pytest.fixture
def after(queue: Queue, context: JobContext) -> Callable[..., JobContext]:
    """The context of a job that depends on others."""

    def make(*depends_on: Any) -> JobContext:
        job = queue.enqueue("jobs.complete", prompt_template="", depends_on=list(depends_on))
        return replace(context, job_id=job.id)

    return make


def prompt_of(context: JobContext, template: str, **kwargs: Any) -> Any:
    task = opened_task(context, "jobs.complete", [], {"prompt_template": template, **kwargs})
    (request,) = task.requests()
    return request.prompt


def test_answers_stand_in_the_order_of_depends_on_whatever_the_job_returned(
    context: JobContext, ended: Ended, after: Any
) -> None:
    completion = run_task(context, "jobs.complete", "a")
    chat = run_task(
        context,
        "jobs.chat",
        [{"role": "user", "content": "b"}],
        answer=lambda _: FakeCompletion("B"),
    )
    several = run_task(context, "jobs.complete", ["c", "d"], n=2)
    jobs = [ended(value) for value in (several, chat, completion, {"n": 3}, "plain", [1, None], 7)]
    context = after(*jobs)
    shown = "{% for answer in answers %}<{{ answer }}>{% endfor %}"
    assert (
        prompt_of(context, shown) == '<["C", "C!", "D", "D!"]><B><A><{"n": 3}><plain><[1, null]><7>'
    )
    assert (
        prompt_of(context, "{{ answers | length }}: {{ answers[2] }} {{ answers[3].n + 1 }}")
        == "7: A 4"
    )
    assert prompt_of(context, "{{ results[2].usage.prompt_tokens }} {{ results[4] }}") == "1 plain"
    assert prompt_of(context, "{{ answers[0] | join(', ') }}") == "C, C!, D, D!"


def test_more_jobs_than_are_read_at_a_time_keep_their_order(ended: Ended, after: Any) -> None:
    jobs = [ended(str(number)) for number in range(2 * MAX_READ_AT_ONCE + 1)]
    expected = " ".join(map(str, reversed(range(len(jobs)))))
    assert prompt_of(after(*reversed(jobs)), "{{ answers | join(' ') }}") == expected
    assert prompt_of(after(jobs[0], jobs[1], jobs[0]), "{{ answers }}") == '["0", "1", "0"]'


def test_contents_of_messages_are_templates_and_an_answer_is_never_one(
    ended: Ended, after: Any
) -> None:
    context = after(ended("{{ answers }} {% if %} ünï"))
    template = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{{ answers[0] }}"},
    ]
    task = opened_task(context, "jobs.chat", [], {"messages_template": template, "max_tokens": 3})
    (request,) = task.requests()
    content = "{{ answers }} {% if %} ünï"
    assert request.messages == [template[0], {"role": "user", "content": content}]
    assert request.sampling["max_tokens"] == 3


def test_a_classification_may_be_of_answers_too(ended: Ended, after: Any) -> None:
    context, turns = after(ended("good")), [{"role": "user", "content": "{{ answers[0] }}?"}]
    options = {"labels": ["yes", "no"], "messages_template": turns}
    (request,) = opened_task(context, "jobs.classify", [], options).requests()
    assert request.messages == [{"role": "user", "content": "good?"}]


def test_a_job_that_failed_has_null_for_its_answer(
    ended: Ended, after: Any, context: JobContext
) -> None:
    partly = run_task(
        context,
        "jobs.complete",
        ["a", "b"],
        answer=lambda r: refuse("no") if r.prompt == "b" else FakeCompletion("A"),
    )
    nothing, failed = ended(None), ended(kind=Result.Type.FAILED)
    context = after(Dependency([nothing, failed, ended(partly)], allow_failure=True))
    assert prompt_of(context, "{{ answers[1] or 'none' }} {{ answers[2] }}") == 'none ["A", null]'
    for null in range(2):
        with pytest.raises(InvalidJob, match="writes is null"):
            prompt_of(context, f"{{{{ answers[{null}] }}}}")


def test_an_answer_that_is_not_there_fails_the_job_by_name(
    queue: Queue, ended: Ended, after: Any, redis: Redis
) -> None:
    gone, waiting, packed = ended("x"), queue.enqueue("jobs.complete", "x"), ended("x")
    unserialisable = ended(NO_JSON_VALUE)
    contexts = [after(job) for job in (gone, waiting, packed, unserialisable)]
    redis.delete(*(f"rq:results:{job.id}" for job in (gone, packed)), gone.key)
    redis.xadd(f"rq:results:{packed.id}", {"type": 1, "return_value": "gASVCgAAAAAAAAB9lC4="})
    says = ["are gone", "'queued'", "is no JSON", "has no JSON"]
    for context, reason in zip(contexts, says, strict=True):
        with pytest.raises(AnswerMissing, match=reason):
            prompt_of(context, "{{ answers[0] }}")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"prompt_template": "{{ answers[5] }}"}, "has no element 5"),
        ({"prompt_template": "{{ answers.__class__ }}"}, "prompt_template: "),
        ({"prompt_template": "x", "max_tokns": 3}, None),
    ],
)
def test_a_template_that_cannot_be_filled_in_fails_the_job_by_name(
    ended: Ended, after: Any, kwargs: dict[str, Any], says: str | None
) -> None:
    from jobs.installed import check_sampling

    context = replace(after(ended("xyz")), check_sampling=check_sampling)
    with pytest.raises(InvalidJob, match=says) as caught:
        opened_task(context, "jobs.complete", [], kwargs)
    assert "xyz" not in caught.value.log_text


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        (
            "jobs.complete",
            {"prompt": "a", "prompt_template": "b"},
            "prompt and prompt_template each say",
        ),
        ("jobs.complete", {"prompt_template": "x" * (2 << 18)}, "more than the limit"),
        ("jobs.chat", {}, "messages is missing: give it, or messages_template"),
    ],
)
def test_what_can_be_no_template_is_refused_before_anything_is_read(
    name: str, kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidJob, match=says):
        task_of(name, [], kwargs)


def test_a_template_needs_jobs_to_depend_on(queue: Queue, context: JobContext) -> None:
    alone = queue.enqueue("jobs.complete", prompt_template="x")
    for job_id in (alone.id, "no such job"):
        with pytest.raises(InvalidJob, match="name them in depends_on"):
            prompt_of(replace(context, job_id=job_id), "x")


def test_what_a_function_returned_is_its_answer_unless_it_is_a_response() -> None:
    assert answer_of({"object": "classification", "label": "yes", "probabilities": {}}) == "yes"
    calls = {"message": {"content": None, "tool_calls": []}, "finish_reason": "tool_calls"}
    assert answer_of({"object": "chat.completion", "choices": [calls]}) is None
    for value in (None, {"object": "chat.completion"}, 1.5):
        assert answer_of(value) == value
    assert answer_of({"object": "text_completion", "choices": [3, {"text": "a"}]}) == [None, "a"]
