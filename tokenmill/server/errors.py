"""Errors in the form of OpenAI's API.

Source: OpenAI's API reference, "Error codes". Clients choose the exception that they raise by the status alone.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from jobs.errors import FAULT_PREFIX

#: OpenAI's `type` of an error, by the status of its response.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(Exception):
    """Raised for a request that cannot be answered.

    status: the response's HTTP status. code: OpenAI's name for the error, such as "model_not_found". param: the wrong
    argument. headers: further headers of the response. project: the project of the request, if the error is raised
    while the project is looked up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        project: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.project = project

    @property
    def response(self) -> Response:
        """Return the error as a response."""
        content: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        body = json.dumps({"error": content}, ensure_ascii=False).encode("utf-8", "replace")
        return Response(body, self.status, self.headers, "application/json")


#: The class before the message in the last line of a traceback.
_ERROR_CLASS = re.compile(r"[\w.]+: ")


def job_error(text: str) -> ApiError:
    """Return the error of a failed job: a 400 if the client is at fault, else a 500.

    text: the job's `exc_string`, whose last lines are the error and the fault.
    """
    status = 500
    message = "the job left no error"
    for line in text.strip().splitlines():
        if line == f"{FAULT_PREFIX}client":
            status = 400
        elif line and not line.startswith(FAULT_PREFIX):
            message = _ERROR_CLASS.sub("", line, count=1)
    return ApiError(status, message)
