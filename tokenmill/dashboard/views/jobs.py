"""The page of one job."""

from typing import Any

from starlette.requests import Request

from jobs.common.display import safe_name
from jobs.runs.plans.names import is_run_id
from jobs.runs.redis_state.state import submitted_by
from tokenmill.dashboard.failures.groups import Remedy, cause_of
from tokenmill.dashboard.seen.jobs_seen import read_job
from tokenmill.dashboard.views.site import Missing, Site


def job(site: Site, request: Request) -> dict[str, Any]:
    """Read one job."""
    job_id = request.path_params["job_id"]
    seen = read_job(site.connection, job_id, with_arguments=site.show_prompts)
    if seen is None:
        raise Missing("Redis does not know this job: it has expired, or was deleted.")
    is_stopped = seen.texts.get("status") == "stopped"
    run = _run_of(job_id)
    return {
        "job": seen,
        "remedy": cause_of(seen.whole_error, is_stopped=is_stopped).remedy,
        "wrong": Remedy.CLIENT,
        "shown_id": safe_name(job_id),
        "show_prompts": site.show_prompts,
        "owner": seen.producer if run is None else submitted_by(site.connection, run),
        "run": run,
    }


def _run_of(job_id: str) -> str | None:
    """Return the id of the run to which a job belongs, as its planning job or a shard; None for any other job."""
    run, _, suffix = job_id.partition("-")
    is_of_run = is_run_id(run) and (suffix == "plan" or suffix[:1].isdigit())
    return run if is_of_run else None
