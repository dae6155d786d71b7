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
    """Show one job."""
    job_id = request.path_params["job_id"]
    found = read_job(site.connection, job_id, with_arguments=site.show_prompts)
    if found is None:
        raise Missing("Redis does not know this job: it has expired, or was deleted.")
    run, _, rest = job_id.partition("-")
    is_of_run = is_run_id(run) and (rest == "plan" or rest[:1].isdigit())
    is_stopped = found.texts.get("status") == "stopped"
    return {
        "job": found,
        "remedy": cause_of(found.whole_error, is_stopped=is_stopped).remedy,
        "wrong": Remedy.CLIENT,
        "shown_id": safe_name(job_id),
        "show_prompts": site.show_prompts,
        "owner": submitted_by(site.connection, run) if is_of_run else found.producer,
        "run": run if is_of_run else None,
    }
