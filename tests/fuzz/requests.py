"""Chats of any shape: a request, or a named error."""

from typing import Any

from hypothesis import strategies as st

from engine import EngineError
from engine.text.prompts import PromptReader
from engine.text.tokenizer import Tokenizer
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import JobsError
from jobs.prompts.prompt_jobs import chat_task
from tests.fuzz.named import check_says
from tests.fuzz.values import MESSAGES, SAMPLING

CHATS = st.tuples(MESSAGES, SAMPLING)
CONTEXT = JobContext(None, "q", "j", "e", (), ServedModel("m", "f", "d"))  # type: ignore[arg-type]
VOCAB_SIZE, MAX_MODEL_LEN = 512, 256


def check_chat(tokenizer: Tokenizer, case: tuple[Any, dict[str, Any]]) -> None:
    """A chat becomes token ids of the model's template, or a named error at one of the two gates."""
    messages, sampling = case
    reader = PromptReader(tokenizer, VOCAB_SIZE, MAX_MODEL_LEN)
    sampling = {name: value for name, value in sampling.items() if name != "messages"}
    try:
        (request,) = chat_task(messages, **sampling).open(CONTEXT).requests()
        token_ids = reader.token_ids(tokenizer.chat_token_ids(request.messages or []))
    except (JobsError, EngineError) as error:
        check_says(error)
    else:
        assert 0 < len(token_ids) < MAX_MODEL_LEN
    try:
        tokenizer.chat_token_ids(messages)
    except EngineError as error:
        check_says(error)
