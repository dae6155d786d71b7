"""Turns the body of `/v1/responses` into the call of a chat."""

from typing import Any

from jobs.common.display import message_of
from jobs.errors import InvalidJob, NotBuilt
from jobs.prompts.openai_responses import chat_of
from tokenmill.server.answers.bodies import Call, call_of
from tokenmill.server.errors import ApiError

_CHAT = "/v1/chat/completions"


def response_call(body: Any) -> Call:
    """Return the call of a chat that a body of `/v1/responses` stands for. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    try:
        chat = chat_of(body)
    except InvalidJob as error:
        message = message_of(error)
        # The message begins with the argument's name, as in "text.format is ...".
        first_word = message.split(" ", 1)[0]
        name = first_word.split(".", 1)[0].strip("'")
        raise ApiError(
            400,
            message,
            code="unsupported_parameter" if isinstance(error, NotBuilt) else None,
            param=name if name in body else None,
        ) from None
    return call_of(_CHAT, chat)
