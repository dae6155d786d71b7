"""Lines of OpenAI's batch files. Each line is a request, with a body as for OpenAI's server.

Source: OpenAI's "Batch API" guide and reference ("request input object", "request output object").
"""

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.common.display import message_of
from jobs.context.checks import REPAIR_OPTIONS
from jobs.context.deadlines import EXPIRED
from jobs.errors import InvalidJob, JobsError, ModelNotServed, RequestFailed, wrong_value_error
from jobs.prompts import openai_responses
from jobs.prompts.arguments import CHAT_ONLY, FOR_OPERATORS, NEUTRAL, SPLIT_TOKENS, is_neutral
from jobs.prompts.messages import MESSAGE_KEYS
from jobs.prompts.openai_responses import PATH as RESPONSES
from jobs.prompts.openai_responses import chat_of, response_object
from jobs.prompts.prompt_jobs import chat_task, complete_task
from jobs.prompts.scoring.embeddings import ARGUMENTS as EMBEDDING_ARGUMENTS
from jobs.prompts.scoring.embeddings import embed_task
from jobs.prompts.templated_task import refuse_template
from jobs.prompts.ways.table import WAY_OPTIONS
from jobs.tasks import Task

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"

#: By endpoint: the function that makes a line's task, and the argument that a body must have.
_ENDPOINTS: Mapping[str, tuple[Callable[..., Task], str]] = {
    CHATS: (chat_task, "messages"),
    COMPLETIONS: (complete_task, "prompt"),
    EMBEDDINGS: (embed_task, "input"),
    RESPONSES: (lambda **body: chat_task(**chat_of(body)), "input"),
}

#: The error code of a line that was not answered. It blames the line: after an error that is not the line's fault, the
#: line's shard is tried again.
ERROR_CODE = "invalid_request"
#: The beginning of the error of a line whose endpoint is not the batch's endpoint.
MISMATCHED = "mismatched endpoint"
#: The error code of a line whose endpoint is not the batch's endpoint.
MISMATCHED_CODE = "mismatched_endpoint"
#: The error code of a line that was not begun before the run's deadline.
EXPIRED_CODE = "batch_expired"


def custom_id(line: Any) -> str | None:
    """Return the custom_id of a line; None if it is missing, empty or no text."""
    if not isinstance(line, dict):
        return None
    name = line.get("custom_id")
    return name if name and isinstance(name, str) else None


@dataclass
class Drops:
    """Collects the names of arguments that are left out of a line.

    is_sampling_value: returns whether the engine knows a sampling value of this name.
    """

    is_sampling_value: Callable[[str], bool]
    left_out: list[str] = field(default_factory=list)


def line_task(
    line: Mapping[str, Any],
    seed: int,
    aliases: Collection[str] = (),
    endpoint: str | None = None,
    drops: Drops | None = None,
) -> Task:
    """Return a line's task. Raises InvalidJob.

    seed: the seed for a line that names no seed. aliases: the names of models for which the served model answers; "*"
    stands for any name. endpoint: the only endpoint that a line may name; None for any.
    drops: collects the names of unsupported arguments, which are left out. With None, such arguments are refused.
    """
    _check_line(line, endpoint)
    url = line["url"]
    body = line["body"]
    refuse_template(body)

    model = body.get("model")
    is_alias = isinstance(model, str) and ("*" in aliases or model in aliases)
    if is_alias:
        body = {name: value for name, value in body.items() if name != "model"}
    if drops is not None:
        body, left_out = without_unsupported(url, body, drops.is_sampling_value)
        drops.left_out += left_out
    make_task, required_name = _ENDPOINTS[url]
    if required_name not in body:
        raise InvalidJob(f"body has no {required_name!r}, which {url} needs")
    has_seed = make_task is not embed_task  # for an embedding, nothing is drawn at random
    if has_seed and body.get("seed") is None:
        body = {**body, "seed": seed}
    return make_task(**body)


def _check_line(line: Mapping[str, Any], endpoint: str | None) -> None:
    """Raise InvalidJob unless a line is a POST request to an endpoint that we serve.

    endpoint: the only endpoint that the line may name; None for any.
    """
    if custom_id(line) is None:
        raise wrong_value_error("custom_id", line.get("custom_id"), "a text that names the line")
    if line.get("method") != "POST":
        raise wrong_value_error("method", line.get("method"), "'POST'")
    url = line.get("url")
    if not isinstance(url, str) or url not in _ENDPOINTS:
        raise wrong_value_error("url", url, " or ".join(map(repr, _ENDPOINTS)))
    if endpoint not in (None, url):
        raise InvalidJob(
            f"{MISMATCHED}: the line's url is {url!r}, and the batch is for {endpoint!r}"
        )
    body = line.get("body")
    if not isinstance(body, dict):
        raise wrong_value_error("body", body, "an object")


#: Arguments of prompts and chats that become other arguments before the engine gets them.
_TEXT_ARGUMENTS = {
    "model",
    "max_completion_tokens",
    "response_format",
    "allow_whitespace",
    SPLIT_TOKENS,
}
_KNOWN: Mapping[str, set[str]] = {
    COMPLETIONS: {"prompt", "echo", *_TEXT_ARGUMENTS, *REPAIR_OPTIONS, *WAY_OPTIONS},
    CHATS: {
        "messages",
        "top_logprobs",
        *CHAT_ONLY,
        *_TEXT_ARGUMENTS,
        *REPAIR_OPTIONS,
        *WAY_OPTIONS,
    },
    EMBEDDINGS: set(EMBEDDING_ARGUMENTS),
}


def without_unsupported(
    url: str, body: Mapping[str, Any], is_sampling_value: Callable[[str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Return a line's body without unsupported arguments, and the names of the arguments that were left out.

    A key of messages is named as `messages[].key`. is_sampling_value: see Drops.
    """
    supported: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in body.items():
        if value is None or _is_supported(url, name, body, is_sampling_value):
            supported[name] = value
        else:
            left_out.append(name)
    messages = supported.get("messages")
    if url == CHATS and isinstance(messages, list):
        keys_left_out: dict[str, None] = {}  # a set that keeps the order
        supported["messages"] = [
            _without_unknown_keys(message, keys_left_out) for message in messages
        ]
        left_out += [f"messages[].{key}" for key in keys_left_out]
    return supported, left_out


def _is_supported(
    url: str, name: str, body: Mapping[str, Any], is_sampling_value: Callable[[str], bool]
) -> bool:
    """Whether an argument of a body is supported with its value."""
    value = body[name]
    if name in NEUTRAL:
        return is_neutral(name, value, body)
    if url == openai_responses.PATH:
        return openai_responses.is_served(name, value)
    if name in FOR_OPERATORS or name in _KNOWN[url]:
        return True
    if url == EMBEDDINGS or name in CHAT_ONLY:  # the endpoint has no such argument
        return False
    return is_sampling_value(name)


def _without_unknown_keys(message: Any, left_out: dict[str, None]) -> Any:
    """Return a message without unknown keys. left_out: a dict to which the names of these keys are added."""
    if not isinstance(message, dict):
        return message
    supported = {}
    for key, value in message.items():
        if key in MESSAGE_KEYS:
            supported[key] = value
        elif value is not None and value != []:  # an empty value asks for nothing
            left_out[key] = None
    return supported


def body_maker(line: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that makes the body of a line's response from the result of the line's task.

    The function keeps no prompt in memory, because many lines wait for their answers at the same time.
    """
    if line["url"] != RESPONSES:
        return lambda answer: answer
    body_without_prompt = {name: value for name, value in line["body"].items() if name != "input"}

    def response(answer: dict[str, Any]) -> dict[str, Any]:
        """Return the response object for a chat's answer."""
        _, _, job_id = answer["id"].partition("-")  # "chatcmpl-" and the job's id
        return response_object(answer, body_without_prompt, job_id, answer["created"])

    return response


def failure_text(error: JobsError) -> str:
    """Return the text of a line's error in the output.

    The text leaves out the request's number, because a line is one request.
    """
    if isinstance(error, ModelNotServed):
        name = str(error.argument("model"))
        return (
            f"{message_of(error)}; or submit the file with model_alias {name!r} (--model-alias {shlex.quote(name)}), "
            "so that the served model answers for that name"
        )
    if isinstance(error, RequestFailed):
        return str(error.argument("reason"))
    return message_of(error)


def output_line(run: str, row: int, name: str | None, body: str | None, error: str | None) -> str:
    """Return a line of the output file, or of the error file if there is an error.

    row: the line's number in the run, from 0. name: the line's custom_id.
    body: the body of the response as JSON; None if there is an error.
    """
    response = None
    if error is None:
        assert body is not None
        response = {"status_code": 200, "request_id": f"req_{run}_{row}", "body": json.loads(body)}
    content: dict[str, Any] = {
        "id": f"batch_req_{run}_{row}",
        "custom_id": name,
        "response": response,
        "error": None,
    }
    if error is not None:
        code = ERROR_CODE
        if error == EXPIRED:
            code = EXPIRED_CODE
        elif error.startswith(MISMATCHED):
            code = MISMATCHED_CODE
        content["error"] = {"code": code, "message": error}
    return json.dumps(content, ensure_ascii=False)
