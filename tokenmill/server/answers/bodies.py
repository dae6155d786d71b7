"""Turns the body of each endpoint into a job.

Sources: OpenAI's API reference ("Chat", "Completions", "Embeddings"); Cohere's and Jina's for `/v1/rerank`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.common.display import message_of
from jobs.errors import InvalidJob
from jobs.prompts.templated_task import refuse_template
from jobs.table import task_of
from tokenmill.server.errors import ApiError


@dataclass(frozen=True)
class Endpoint:
    """A path that a job answers. needed: the arguments that a body must have."""

    function: str
    needed: tuple[str, ...]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("jobs.chat", ("messages",)),
    "/v1/completions": Endpoint("jobs.complete", ("prompt",)),
    "/v1/embeddings": Endpoint("jobs.embed", ("input",)),
    "/v1/rerank": Endpoint("jobs.rerank", ("query", "documents")),
    "/v1/classify": Endpoint("jobs.classify_text", ("input",)),
}

#: The job of `/v1/classify` if the body has labels. Without labels the model's head gives its own classes.
_LABELLED = Endpoint("jobs.classify", ("labels",))


@dataclass(frozen=True)
class Call:
    """A job that is to be enqueued.

    model: the name of the model that is asked for; None for any. is_streamed: whether the answer is sent as it grows.
    has_growing_text: whether each text so far is a beginning of the final one. with_usage: whether a stream ends with
    the counts of tokens. on_enqueued: called once Redis has the job. producer: whose job it is, as an operator sees it.
    """

    function: str
    arguments: dict[str, Any]
    model: str | None
    is_streamed: bool = False
    has_growing_text: bool = False
    with_usage: bool = False
    on_enqueued: Callable[[], None] = lambda: None
    producer: str = ""

    def let_arguments_go(self) -> None:
        """Drop what is in Redis now: a call that waits for its answer holds no body."""
        self.arguments.clear()
        self.on_enqueued()


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
    body, is_streamed, with_usage = _without_stream(path, body)
    _refuse_paths([body.get("messages"), body.get("prompt")])
    try:
        refuse_template(body)
        task_of(endpoint.function, (), body)
    except InvalidJob as error:
        message = message_of(error)
        param = message.split(" ", 1)[0]
        raise ApiError(400, message, param=param if param in body else None) from None
    model = body.get("model")
    return Call(
        endpoint.function,
        body,
        model if isinstance(model, str) else None,
        is_streamed=is_streamed,
        has_growing_text=is_streamed and _has_growing_text(body),
        with_usage=with_usage,
    )


#: Paths whose answers may be streamed.
_STREAMED = ("/v1/chat/completions", "/v1/completions")
#: Arguments with which a prompt may be asked again, or an answer is made of several texts.
_NOT_GROWING = ("check", "continue_on_length", "agree", "tool", "echo")


def _without_stream(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], bool, bool]:
    """Return a body without its options of streams, whether it asks for a stream, and whether for usage.

    Raises ApiError.
    """
    other_values = dict(body)
    stream = other_values.pop("stream", None)
    options = other_values.pop("stream_options", None)
    if stream not in (None, True, False):
        raise ApiError(400, "stream is neither true nor false", param="stream")
    if not stream:
        if options is not None:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return other_values, False, False
    if path not in _STREAMED:
        raise ApiError(400, f"{path} does not stream: leave stream out", param="stream")
    if options is None:
        options = {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "stream_options has include_usage alone", param="stream_options")
    return other_values, True, bool(options.get("include_usage"))


def _has_growing_text(body: Mapping[str, Any]) -> bool:
    """Whether one prompt is asked exactly once."""
    if any(body.get(name) for name in _NOT_GROWING):
        return False
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))


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
