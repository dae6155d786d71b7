import pickle
import subprocess
import sys
import traceback
from dataclasses import replace

import pytest

import jobs
from jobs import errors
from jobs.context import JobContext
from jobs.installed import check_sampling
from jobs.prompts.arguments import MAX_PROMPT_BYTES, MAX_PROMPTS, Unusable
from jobs.prompts.messages import MAX_MESSAGES
from jobs.prompts.prompt_task import PROGRESS_AFTER_S, PROGRESS_EVERY_S, PromptTask
from jobs.prompts.responses import text_completion
from jobs.table import ALLOWED_FUNCTIONS, own_function, task_of
from jobs.tasks import Request
from tests.jobs.answering import MODEL, FakeCompletion, opened_task, refuse, run_task, shout

TEXT_PART = {"type": "text", "text": "hi"}


def test_completion_has_openais_shape(context: JobContext) -> None:
    response = run_task(context, "jobs.complete", "hello", max_tokens=5)
    assert isinstance(response.pop("created"), int)
    usage = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    usage |= {"prompt_tokens_details": {"cached_tokens": 2}}
    assert response == {
        "id": "cmpl-job-0",
        "object": "text_completion",
        "model": "m",
        "system_fingerprint": MODEL.fingerprint,
        "choices": [{"index": 0, "text": "HELLO", "finish_reason": "stop", "logprobs": None}],
        "usage": usage,
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), (["a", [3]], ["a", [3]])],
)
def test_prompt_may_be_text_or_token_ids_or_a_list_of_either(
    context: JobContext, prompt: object, expected: list[object]
) -> None:
    task = opened_task(context, "jobs.complete", [prompt])
    assert [request.prompt for request in task.requests()] == expected


def test_prompts_of_a_list_have_seeds_of_their_own_that_follow_from_the_jobs(
    context: JobContext,
) -> None:
    """The first keeps it: a job of one prompt is answered as before; without a seed the engine draws one for each."""

    def seeds_of(prompt: object, **sampling: int) -> list[int | None]:
        requests = opened_task(context, "jobs.complete", [prompt], sampling).requests()
        return [request.sampling.get("seed") for request in requests]

    seeds = seeds_of([*"abcd"], seed=5)
    assert seeds == seeds_of([*"abcd"], seed=5)
    assert seeds[0] == 5
    assert len(set(seeds)) == 4
    assert seeds_of("a", seed=5) == [5]
    assert seeds_of([*"abcd"]) == [None] * 4


def test_choices_keep_the_order_of_prompts_and_samples_and_count_each_prompt_once() -> None:
    requests = [Request(text, None, {"n": 2}) for text in "ab"]
    context = JobContext(None, "q", "j", "e", (), MODEL)  # type: ignore[arg-type]
    task = PromptTask(requests, text_completion, sampling={"n": 2}, clock=lambda: 12.9).open(
        context
    )
    assert len(list(task.requests())) == 2
    first, second = (FakeCompletion(num_prompt_tokens=number, token_ids=[1]) for number in (4, 3))
    task.deliver(
        1, [replace(second, text="b1", index=1), replace(second, text="b0", token_ids=[1, 2])]
    )
    task.deliver(0, [replace(first, text="a0"), replace(first, text="a1", index=1)])
    response = task.result()
    choices = [(choice["index"], choice["text"]) for choice in response["choices"]]
    assert choices == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert response["created"] == 12
    assert response["usage"]["prompt_tokens"] == 7
    assert response["usage"]["completion_tokens"] == 5


def refuse_b(request: Request) -> FakeCompletion:
    return refuse("too long") if request.prompt == "b" else shout(request)


def test_a_bad_prompt_of_a_list_fails_its_choices_and_not_its_neighbours(
    context: JobContext,
) -> None:
    prompts = ["a", "b", None, "c", "\ud800"]
    response = run_task(context, "jobs.complete", prompts, answer=refuse_b)
    choices = response["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    assert [choice["text"] for choice in choices] == ["A", "", "", "C", ""]
    assert [choice["finish_reason"] for choice in choices] == [
        "stop",
        "error",
        "error",
        "stop",
        "error",
    ]
    told = [choice.get("error", "").partition(",")[0] for choice in choices]
    assert told[:4] == ["", "too long", "prompt 2 is NoneType", ""]
    assert response["usage"]["prompt_tokens"] == 2


def test_sampling_values_that_cannot_be_fail_the_job_before_its_prompts(
    context: JobContext,
) -> None:
    context = replace(context, check_sampling=check_sampling)
    with pytest.raises(errors.InvalidJob, match=r"'max_tokns' is no .*did you mean max_tokens\?"):
        run_task(context, "jobs.complete", "a", max_tokns=5)
    with pytest.raises(
        errors.InvalidJob, match=r"temperature must be between 0 and .*, got -1"
    ) as bad:
        run_task(context, "jobs.chat", [{"role": "user", "content": "a"}], temperature=-1)
    assert "-1" not in bad.value.log_text


def test_a_message_for_the_log_leaves_out_what_may_be_a_prompt() -> None:
    secret = "the patient in room 4"
    found = [
        errors.RequestFailed(0, f"the chat template refused these messages: {secret}"),
        errors.InvalidValue(
            "template field {}: only a plain column name may stand in braces", secret
        ),
    ]
    with pytest.raises(errors.InvalidJob) as not_a_number:
        task_of("jobs.complete", ["a"], {"max_tokens": secret})
    for error in [*found, not_a_number.value]:
        assert secret in str(error)
        assert "patient" not in error.log_text
        assert len(error.log_text) > 30


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (errors.InvalidJob("x"), "client"),
        (errors.DiskFull("p", "r"), "server"),
        (errors.RunCancelled("r"), "cancelled"),
    ],
)
def test_a_traceback_ends_with_a_line_that_classes_the_error(
    error: errors.JobsError, fault: str
) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert traceback.format_exception(each)[-1] == f"tokenmill: {fault}\n"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "says"),
    [
        ("jobs.complete", [], {}, "prompt is missing: give it, or prompt_template"),
        (
            "jobs.complete",
            ["a", "b"],
            {},
            "too many positional arguments; it takes prompt, prompt_template",
        ),
        (
            "jobs.classify_text",
            [],
            {"text": "a"},
            "argument: 'input'; it takes input, truncate_prompt_tokens, model",
        ),
        ("jobs.complete", ["a"], {"max_tokens": "64"}, "max_tokens:=64"),
        ("jobs.complete", [7], {}, "prompt is int"),
        ("jobs.complete", [[]], {}, "empty list"),
        ("jobs.complete", ["\ud800"], {}, "not valid Unicode"),
        ("jobs.complete", ["x" * (MAX_PROMPT_BYTES + 1)], {}, "1048577 bytes, more than the limit"),
        ("jobs.complete", {"prompt": "a"}, {}, "must hold a list of arguments"),
        ("jobs.chat", [[]], {}, "non-empty list"),
        (
            "jobs.chat",
            [[{"role": "user", "content": [TEXT_PART, {"type": "image_url"}]}]],
            {},
            "'image_url'",
        ),
        (
            "jobs.complete",
            [["a"] * (MAX_PROMPTS + 1)],
            {},
            "10001 prompts, more than the limit of 10000",
        ),
        ("jobs.chat", [[{"role": "", "content": ""}] * (MAX_MESSAGES + 1)], {}, "10001 messages"),
        ("jobs.complete", [["a"] * 101], {"n": 100}, "ask for 10100 answers, more than the limit"),
    ],
)
def test_wrong_arguments_fail_with_a_message_that_names_them(
    name: str, args: list[object], kwargs: dict[str, object], says: str
) -> None:
    with pytest.raises(errors.InvalidJob) as caught:
        task_of(name, args, kwargs)
    assert says in str(caught.value)


def test_a_job_of_files_is_refused_by_name_whatever_its_arguments_are_called(
    context: JobContext,
) -> None:
    task = task_of("jobs.score_shard", [], {"self": 1, "name": 2})
    assert task is not None
    with pytest.raises(errors.InvalidJob, match="missing a required argument: 'run'"):
        task.open(context)


@pytest.mark.parametrize("name", ["jobs.os.system", "os.system", "jobs.table.task_of"])
def test_other_names_are_no_jobs_of_ours(name: str) -> None:
    assert task_of(name, ["true"]) is None
    assert own_function(name) is None
    assert name not in ALLOWED_FUNCTIONS


def test_every_allowed_name_is_an_attribute_that_a_stock_worker_can_resolve() -> None:
    for name in ALLOWED_FUNCTIONS:
        package, _, attribute = name.partition(".")
        assert package == "jobs"
        assert callable(getattr(jobs, attribute))
    assert jobs.__tokenmill__


@pytest.mark.processes
def test_importing_jobs_and_opening_tasks_loads_no_heavy_package() -> None:
    code = """
import sys, jobs, jobs.table
jobs.table.task_of("jobs.complete", ["a"])
jobs.table.task_of("jobs.score_shard", ["0" * 16, "/plan", 0])
named = {"torch", "transformers", "pyarrow", "pydantic", "numpy", "jinja2", "engine", "worker"}
heavy = named & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_long_job_of_several_prompts_tells_how_far_it_is_and_not_too_often(
    context: JobContext,
) -> None:
    now = 100.0
    requests = [Request(text, None, {}) for text in "abcd"]
    refused = Unusable("a prompt is empty")
    task = PromptTask([*requests, refused], text_completion, clock=lambda: now).open(context)
    assert len(list(task.requests())) == 4
    task.deliver(0, [FakeCompletion(token_ids=[1, 2, 3])])
    now += PROGRESS_AFTER_S - 0.1
    assert task.progress() is None
    now += 0.1
    shown = task.progress()
    assert shown == {"prompts": 5, "prompts_done": 2, "tokens": 3}
    task.deliver(1, [refuse("too long")])
    now += PROGRESS_EVERY_S - 0.1
    assert task.progress() is shown
    now += 0.1
    assert task.progress() == {"prompts": 5, "prompts_done": 3, "tokens": 3}
    alone = PromptTask(requests[:1], text_completion, clock=lambda: now).open(context)
    list(alone.requests())
    assert alone.progress() is None
    now += 1000
    assert alone.progress() == {"prompts": 1, "prompts_done": 0, "tokens": 0}


def test_documents_that_cannot_be_scored_come_last_however_low_the_others_are(
    context: JobContext,
) -> None:
    """A cross-encoder's relevance is any number."""
    relevance = {"low": -7.5, "lower": -9.0, "high": 2.0}

    def answer(request: Request) -> FakeCompletion:
        document = request.sampling["pair"]
        if document not in relevance:
            return refuse("too long")
        return FakeCompletion(class_scores={"relevance": relevance[document]})

    context = replace(context, model=replace(MODEL, classes=("relevance",)))
    found = run_task(
        context, "jobs.rerank", "query", ["bad", "lower", "high", "low"], answer=answer
    )
    assert [result["document"]["text"] for result in found["results"]] == [
        "high",
        "low",
        "lower",
        "bad",
    ]
