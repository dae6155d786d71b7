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
    """A path whose calls are answered by jobs. function: the name of the function that these jobs call.

    needed: the arguments that a body must have.
    """

    function: str
    needed: tuple[str, ...]


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("jobs.chat", ("messages",)),
    "/v1/completions": Endpoint("jobs.complete", ("prompt",)),
    "/v1/embeddings": Endpoint("jobs.embed", ("input",)),
    "/v1/rerank": Endpoint("jobs.rerank", ("query", "documents")),
    "/v1/classify": Endpoint("jobs.classify_text", ("input",)),
}

#: The endpoint of `/v1/classify` for a body with labels. Without labels, the classes are those of the model's head.
_LABELLED = Endpoint("jobs.classify", ("labels",))


@dataclass(frozen=True)
class Call:
    """The job of a request, before it is enqueued.

    model: the name of the requested model; None for any. is_streamed: whether the answer is sent as events.
    has_growing_text: whether the text can be sent as it grows, because every part of it belongs to the final text.
    with_usage: whether a stream ends with the counts of tokens. on_enqueued: called once the job is in Redis.
    producer: the name under which operators see the job.
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
        """Free the memory of the arguments, which are in Redis now, and call `on_enqueued`."""
        self.arguments.clear()
        self.on_enqueued()


def call_of(path: str, body: Any) -> Call:
    """Return the call that a body makes. Raises ApiError for a body that no worker can answer.

    path: one of ENDPOINTS.
    """
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
    stream = _stream_options(path, body)
    arguments = dict(body)
    arguments.pop("stream", None)
    arguments.pop("stream_options", None)
    _refuse_paths([arguments.get("messages"), arguments.get("prompt")])
    try:
        # A worker would refuse the same arguments with the same errors, but only after the job has waited.
        refuse_template(arguments)
        task_of(endpoint.function, (), arguments)
    except InvalidJob as error:
        message = message_of(error)
        first_word = message.split(" ", 1)[0]
        param = first_word if first_word in arguments else None
        raise ApiError(400, message, param=param) from None
    model = arguments.get("model")
    return Call(
        endpoint.function,
        arguments,
        model if isinstance(model, str) else None,
        is_streamed=stream.is_streamed,
        has_growing_text=stream.is_streamed and _has_growing_text(arguments),
        with_usage=stream.with_usage,
    )


#: Paths whose answers may be streamed.
_STREAMED = ("/v1/chat/completions", "/v1/completions")
#: Arguments with which a prompt may be run again, or the answer may be put together from several texts.
_NOT_GROWING = ("check", "continue_on_length", "agree", "tool", "echo")


@dataclass(frozen=True)
class _StreamOptions:
    """The options of a body that are about streams. with_usage: whether a stream ends with the counts of tokens."""

    is_streamed: bool = False
    with_usage: bool = False


def _stream_options(path: str, body: Mapping[str, Any]) -> _StreamOptions:
    """Return the stream options of a body. Raises ApiError for wrong ones."""
    stream = body.get("stream")
    options = body.get("stream_options")
    if stream not in (None, True, False):
        raise ApiError(400, "stream is neither true nor false", param="stream")
    if not stream:
        if options is not None:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return _StreamOptions()
    if path not in _STREAMED:
        raise ApiError(400, f"{path} does not stream: leave stream out", param="stream")
    if options is None:
        options = {}
    # include_obfuscation is accepted, because clients of OpenAI may send it. It changes nothing here.
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "stream_options may have only include_usage", param="stream_options")
    return _StreamOptions(is_streamed=True, with_usage=bool(options.get("include_usage")))


def _has_growing_text(arguments: Mapping[str, Any]) -> bool:
    """Whether the answer's text can be sent while it grows: if there is one prompt, which is run exactly once."""
    if any(arguments.get(name) for name in _NOT_GROWING):
        return False
    prompt = arguments.get("prompt")
    if not isinstance(prompt, list):
        return True
    # A list of numbers is one prompt of token ids.
    return bool(prompt) and isinstance(prompt[0], int)


def _refuse_paths(value: object) -> None:
    """Raise ApiError if a value names a picture by a path or a web address. A worker would open such a path.

    Producers of jobs may name files in the workers' data folders. Clients of this server may not.
    """
    values = [value]
    while values:
        part = values.pop()
        if isinstance(part, list):
            values += part
        elif isinstance(part, dict):
            values += [part[name] for name in ("content", "image", "image_url") if name in part]
            url = None
            for name in ("url", "image_url", "image"):
                if name in part:
                    url = part[name]
                    break
            if isinstance(url, str) and url[:5].lower() != "data:":
                raise ApiError(
                    400,
                    "a picture is no data: URL, and none is fetched: send data:image/...;base64,...",
                    param="messages",
                )
