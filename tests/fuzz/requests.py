"""Sampling values and chats: a request, or a named error."""

from typing import Any

import torch
from hypothesis import strategies as st

from engine import EngineError, SamplingParams
from engine.sampling.sampler import sample
from engine.sampling.sampling_params import check_params
from engine.sampling.sampling_rows import SamplingRows
from engine.schedule.scheduled_batch import ScheduledBatch
from engine.schedule.sequence import Sequence
from engine.schedule.slots import SlotTable
from engine.schedule.step_batch import build_sampling_batch
from engine.text.prompts import PromptReader
from engine.text.tokenizer import Tokenizer
from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.errors import JobsError
from jobs.prompts.prompt_task import chat_task, complete_task
from tests.fuzz.named import check_says
from tests.fuzz.values import MESSAGES, SAMPLING

CHATS = st.tuples(MESSAGES, SAMPLING)
CONTEXT = JobContext(None, "q", "j", "e", (), ServedModel("m", "f", "d"))  # type: ignore[arg-type]
VOCAB_SIZE, MAX_MODEL_LEN = 512, 256


def check_sampling(values: dict[str, Any]) -> None:
    """The engine takes the values or refuses them by name, and so does a job that carries them."""
    try:
        params = SamplingParams.from_mapping(values)
        check_params(params, VOCAB_SIZE)
    except EngineError as error:
        check_says(error)
    else:
        assert 1 <= params.n <= 128
        assert 0 <= _sample(params) < VOCAB_SIZE
    values = {name: value for name, value in values.items() if name != "prompt"}
    try:
        complete_task("a", **values)
    except JobsError as error:
        check_says(error)


def _sample(params: SamplingParams) -> int:
    """Choose a token as a step does, which keeps the values in arrays."""
    slots = SlotTable(1, MAX_MODEL_LEN, 16)
    seq = Sequence("a", [1], params, seed=params.seed or 0, stop_token_ids=frozenset(params.stop_token_ids))
    seq.block_table = [0]
    slots.assign(seq)
    batch = ScheduledBatch()
    batch.add_prefill(seq, 1)
    logits = torch.linspace(-9, 9, VOCAB_SIZE).reshape(1, VOCAB_SIZE)
    return int(sample(logits, SamplingRows.upload(build_sampling_batch(batch, slots), logits.device)))


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
