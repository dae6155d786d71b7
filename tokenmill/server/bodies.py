"""What the body of each endpoint asks for, as a job.

Sources: OpenAI's API reference ("Chat", "Completions", "Embeddings"); Cohere's and Jina's for `/v1/rerank`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.common.display import message_of
from jobs.errors import InvalidJob
from jobs.prompts.templated_task import refuse_template
from jobs.table import task_of
from tokenmill.server.errors import ApiError


@dataclass(frozen=True)
class Endpoint:
    """A path that a job answers. needed: arguments without a default."""

    function: str
    needed: tuple[str, ...]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("jobs.chat", ("messages",)),
    "/v1/completions": Endpoint("jobs.complete", ("prompt",)),
    "/v1/embeddings": Endpoint("jobs.embed", ("input",)),
    "/v1/rerank": Endpoint("jobs.rerank", ("query", "documents")),
    "/v1/classify": Endpoint("jobs.classify_text", ("input",)),
}

#: With labels, `/v1/classify` chooses among these; without, the model's own head says its classes.
_LABELLED = Endpoint("jobs.classify", ("labels",))


@dataclass(frozen=True)
class Call:
    """A job that is to be enqueued. model: the one that is asked for; None for any."""

    function: str
    arguments: Mapping[str, Any]
    model: str | None


def call_of(path: str, body: Any) -> Call:
    """Return the job that a body asks for. Raises ApiError for one that no worker could answer."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    endpoint = ENDPOINTS[path]
    if path == "/v1/classify" and "labels" in body:
        endpoint = _LABELLED
    for name in endpoint.needed:
        if body.get(name) is None:
            raise ApiError(
                400,
                f"{name} is missing, which {path} needs",
                code="missing_required_parameter",
                param=name,
            )
    if body.get("stream"):
        raise ApiError(
            400,
            "stream is true, and answers are not streamed yet: leave it out",
            code="unsupported_parameter",
            param="stream",
        )
    _refuse_paths([body.get("messages"), body.get("prompt")])
    try:
        refuse_template(body)
        task_of(endpoint.function, (), body)
    except InvalidJob as error:
        message = message_of(error)
        param = message.split(" ", 1)[0]
        raise ApiError(400, message, param=param if param in body else None) from None
    model = body.get("model")
    return Call(endpoint.function, body, model if isinstance(model, str) else None)


def _refuse_paths(value: object) -> None:
    """Raise ApiError for a picture that is named by a path: a worker would read it from its disk.

    A job's producer may name files of the data roots; a client of this server may not.
    """
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, list):
            values += part
        elif isinstance(part, dict):
            values += [part[name] for name in ("content", "image", "image_url") if name in part]
            url = part.get("url", part.get("image_url", part.get("image")))
            if isinstance(url, str) and url[:5].lower() != "data:":
                raise ApiError(
                    400,
                    "a picture is no data: URL, and none is fetched: send data:image/...;base64,...",
                    param="messages",
                )
