"""What producers use: job functions for prompts and Parquet runs, and the `tokenmill` command line.

A producer needs only `rq` and the names of these functions as strings:

    Queue("prompts", connection=redis, serializer="json").enqueue("jobs.complete", "Hello", max_tokens=16)

A stock `rq worker` calls the functions below. `worker.BatchWorker` makes tasks in their place (jobs/table.py). Programs
make and await runs by `jobs.submit` and `jobs.run` (jobs/client.py), which no worker calls. Importing this package
loads no torch, transformers, pyarrow or pydantic.
"""

from typing import TYPE_CHECKING, Any

from jobs.errors import JobsError
from jobs.installed import run_job

if TYPE_CHECKING:
    from jobs.client import Run, response_format, run, submit

#: Marks this package, because others may be named `jobs` too.
__tokenmill__ = True

__all__ = [
    "JobsError",
    "Run",
    "chat",
    "classify",
    "classify_text",
    "complete",
    "embed",
    "loglikelihood",
    "post_run_end",
    "rerank",
    "response_format",
    "run",
    "score_parquet",
    "score_shard",
    "submit",
    "survey_parquet",
    "verify_rows",
]


def __getattr__(name: str) -> Any:
    """Import jobs/client.py when one of its names is first used. A process that makes no runs then loads no rq."""
    if name not in ("Run", "response_format", "run", "submit"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jobs import client

    return getattr(client, name)


def complete(prompt: str | list[Any] | None = None, **options: Any) -> dict[str, Any]:
    """Complete a string, token ids, or a list of either; return OpenAI's `text_completion`.

    options: the fields of engine.SamplingParams; prompt_template, in place of a prompt; model, the name of the model
    that must answer. Raises InvalidJob, AnswerMissing, or RequestFailed if all prompts failed.
    """
    return run_job("jobs.complete", (prompt,), options)


def chat(messages: list[dict[str, Any]] | None = None, **options: Any) -> dict[str, Any]:
    """Answer a chat of {'role', 'content'} messages; return OpenAI's `chat.completion`.

    options: the options of `complete`, with messages_template in place of prompt_template. Raises the errors of
    `complete`.
    """
    return run_job("jobs.chat", (messages,), options)


def classify(
    prompt: str | list[int] | None = None, labels: list[str] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the exact probability of each label after a prompt or a chat, by one prefill.

    Returns `{"object": "classification", "label", "probabilities": {label: p}, "usage", "model", ...}`.
    options: messages, chat_template_kwargs, tools, truncate_prompt_tokens, model, prompt_template, messages_template,
    calibrate. With `calibrate`, the probability of each label is divided by its probability after a prompt without
    content, and the results are scaled to a sum of 1 (Zhao et al. 2021). Raises the errors of `complete`.
    """
    return run_job("jobs.classify", (prompt, labels), options)


def classify_text(input: str | list[Any], **options: Any) -> dict[str, Any]:
    """Classify texts with a model that has a sequence-classification head, such as a filter or a reward model.

    Returns `{"object": "list", "data": [{"index", "label", "score", "probabilities"}], "usage", "model"}`. If the head
    has one output, there is only the `score`. options: truncate_prompt_tokens, model. Raises the errors of `embed`.
    """
    return run_job("jobs.classify_text", (input,), options)


def loglikelihood(
    prompt: str | list[int], continuations: list[str] | list[list[int]], **options: Any
) -> dict[str, Any]:
    """Return the log-likelihood of each continuation of a prompt, by prefill alone.

    Returns `{"object": "loglikelihood", "choices": [{"index", "text", "logprob", "num_tokens", "is_greedy"}], ...}`.
    options: truncate_prompt_tokens, model. Raises InvalidJob, or RequestFailed.
    """
    return run_job("jobs.loglikelihood", (prompt, continuations), options)


def rerank(
    query: str, documents: list[str] | list[dict[str, str]], **options: Any
) -> dict[str, Any]:
    """Sort documents by how well they answer a query, with a cross-encoder or a model such as Qwen3-Reranker.

    Returns `{"object": "rerank", "results": [{"index", "relevance_score", "document"}], "usage", "model"}`.
    options: instruction, top_n, return_documents, model. Raises InvalidJob, or RequestFailed if all documents failed.
    """
    return run_job("jobs.rerank", (query, documents), options)


def embed(input: str | list[Any], **options: Any) -> dict[str, Any]:
    """Embed a string, token ids, or a list of either; return OpenAI's list of embeddings.

    options: dimensions, encoding_format, normalize, prompt_name, user, truncate_prompt_tokens, model.
    Raises InvalidJob, or RequestFailed if all texts failed. If only some texts failed, each failed text has an `error`.
    """
    return run_job("jobs.embed", (input,), options)


def score_parquet(
    input: str | list[str], output: str, *more: Any, **options: Any
) -> dict[str, Any]:
    """Plan a Parquet run and enqueue its shards, or resume the run. For the arguments see RunSpec and Submission."""
    return run_job("jobs.score_parquet", (input, output, *more), options)


def survey_parquet(input: str | list[str], **arguments: Any) -> dict[str, Any]:
    """Return what a run would ask, and write nothing; for `tokenmill preview` and `submit --dry-run`."""
    return run_job("jobs.survey_parquet", (input,), arguments)


def post_run_end(webhook: str, content: dict[str, Any]) -> dict[str, Any]:
    """POST the notice of a run's end to the run's webhook. Tokenmill enqueues this job itself."""
    return run_job("jobs.post_run_end", (webhook, content), {})


def score_shard(run: str, plan: str, shard: int, *more: Any) -> dict[str, Any]:
    """Score one shard of a planned run; enqueued by score_parquet only."""
    return run_job("jobs.score_shard", (run, plan, shard, *more), {})


def verify_rows(run: str, plan: str, sample: int | str = "1%", seed: int = 0) -> dict[str, Any]:
    """Compute a sample of a finished run's rows again, and compare the answers; enqueued by `tokenmill verify`."""
    return run_job("jobs.verify_rows", (run, plan, sample, seed), {})
