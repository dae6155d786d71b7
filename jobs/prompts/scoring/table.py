"""The kinds of scoring that jobs and runs may ask for."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jobs.prompts.scoring.classes import Classes, classify_text_task
from jobs.prompts.scoring.embeddings import Embeddings, embed_task
from jobs.prompts.scoring.kind import Scoring
from jobs.prompts.scoring.labels import Labels, classify_task
from jobs.prompts.scoring.likelihoods import loglikelihood_task
from jobs.prompts.scoring.ranking import Relevance, rerank_task
from jobs.tasks import Task


class ScoringJob(NamedTuple):
    """A job that scores. Runs may score their rows in the same way.

    name: the function that producers enqueue. make_task: makes the job's task from its arguments.
    scoring: how the rows of a run are scored; None if runs cannot score in this way.
    run_task: a run asks for this scoring when its option `task` has this value; None if another option asks for it.
    """

    name: str
    make_task: Callable[..., Task]
    scoring: type[Scoring] | None = None
    run_task: str | None = None


#: To add a kind of scoring, add its file, and a line here. A run asks for labels by its option `labels`.
SCORING_JOBS = (
    ScoringJob("jobs.embed", embed_task, Embeddings, "embed"),
    ScoringJob("jobs.classify", classify_task, Labels),
    ScoringJob("jobs.classify_text", classify_text_task, Classes, "classify"),
    ScoringJob("jobs.rerank", rerank_task, Relevance, "rerank"),
    ScoringJob("jobs.loglikelihood", loglikelihood_task),
)


def _run_scorings() -> dict[str, type[Scoring]]:
    """Return the scorings that runs may ask for, by the value of a run's option `task`."""
    scorings = {}
    for job in SCORING_JOBS:
        if job.run_task is not None and job.scoring is not None:
            scorings[job.run_task] = job.scoring
    return scorings


RUN_SCORINGS: Mapping[str, type[Scoring]] = _run_scorings()
