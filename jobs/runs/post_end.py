"""Posts a run's end: what `jobs.post_run_end` does inside a worker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

from jobs.common.display import brief
from jobs.context import JobContext
from jobs.context.webhooks import call_webhook, check_host
from jobs.errors import InvalidValue
from jobs.runs.refusals import WebhookFailed, WebhookRefused

#: Seconds before each further call.
PAUSES_S = (1.0, 2.0, 4.0, 8.0)

#: A run's end in JSON is far smaller.
MAX_BODY_BYTES = 64 << 10

#: Answers after which another call may go better.
_PASSING = frozenset({408, 425, 429})


def post_run_end(
    context: JobContext, webhook: str, content: dict[str, Any], sleep: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """POST what is told of a run's end to a URL whose host this worker may call; return the answer's status.

    Tried again where nobody answers, or with 408, 425, 429 or 5xx. Raises WebhookFailed in the end, after
    which the job has further tries; InvalidJob or WebhookRefused at once.
    """
    check_host(webhook, context.webhook_hosts)
    body = json.dumps(content).encode() if isinstance(content, dict) else b""
    if not 0 < len(body) <= MAX_BODY_BYTES:
        raise InvalidValue("content is {}, expected a small mapping", brief(content))
    for pause_s in (*PAUSES_S, None):
        context.check_interrupted()
        status, problem = _post(context, webhook, body)
        if status is not None and 200 <= status < 300:
            return {"status": status}
        if status is not None and status < 500 and status not in _PASSING:
            raise WebhookRefused(f"it answered {status}")
        if pause_s is None:
            break
        sleep(pause_s)
    raise WebhookFailed(problem)


def _post(context: JobContext, url: str, body: bytes) -> tuple[int | None, str]:
    """Return the answer's status, or None and why there is none."""
    headers = {"Content-Type": "application/json", "User-Agent": "tokenmill"}
    try:
        status = call_webhook(url, context.webhook_hosts, headers=headers, body=body)
    except (OSError, HTTPException) as error:
        return None, f"no answer ({type(error).__name__})"
    return status, f"it answered {status}"
