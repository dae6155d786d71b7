"""A worker with a Llama checkpoint: prompts, chats and a file, with transformers' own answers."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rq.job import JobStatus
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.demo.random_model import make_model
from tests.e2e.conftest import RealWorkers
from tests.rq_workers import leftovers

pytestmark = pytest.mark.long

GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
TEXTS = ["the 3rd of March, '87", "Freitag, den 9. November 1989", "call 555-0199 before noon"]
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}"
)


class Truth:
    """transformers' greedy answers, their special tokens left out."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def complete(self, text: str, *, add_special_tokens: bool = True) -> str:
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, return_tensors="pt")
        assert (ids == self.tokenizer.bos_token_id).sum() == 1
        self.model.generation_config.eos_token_id = None
        output = self.model.generate(ids, max_new_tokens=GREEDY["max_tokens"], do_sample=False)
        return str(self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    def chat(self, messages: list[dict[str, Any]]) -> str:
        text = self.tokenizer.apply_chat_template(messages, chat_template=STRICT, tokenize=False)
        return self.complete(text, add_special_tokens=False)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_llama_worker_runs_both_kinds_of_job(workers: RealWorkers) -> None:
    """With a template chosen by name, which refuses a system message: the row's error and the job's."""
    folder = make_model(workers.folder / "llama", "llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "strict.jinja").write_text(STRICT)
    truth = Truth(folder)
    system = [{"role": "system", "content": "Be kind."}, *user(TEXTS[0])]
    chats = [user(TEXTS[0]), user([{"type": "text", "text": TEXTS[1]}]), system]
    source = workers.folder / "in.parquet"
    pq.write_table(pa.table({"messages": [json.dumps(chat) for chat in chats]}), source)

    queue = workers.queue("bulk")
    prompts = queue.enqueue("jobs.complete", TEXTS, **GREEDY)
    chat = queue.enqueue("jobs.chat", user(TEXTS[2]), **GREEDY)
    refused = queue.enqueue("jobs.chat", system, **GREEDY)
    call = {"messages_column": "messages", "sampling": GREEDY}
    queue.enqueue("jobs.score_parquet", str(source), str(workers.folder / "out"), **call)
    log = workers.burst(TOKENMILL_MODEL=str(folder), TOKENMILL_CHAT_TEMPLATE="strict")

    assert prompts.get_status() == JobStatus.FINISHED, log
    assert "LlamaForCausalLM runs natively" in log
    choices = prompts.return_value()["choices"]
    assert [choice["text"] for choice in choices] == [truth.complete(text) for text in TEXTS]
    assert chat.return_value()["choices"][0]["message"]["content"] == truth.chat(user(TEXTS[2]))
    assert "System role not supported" in str(workers.result(refused).exc_string)
    rows = pq.read_table(workers.folder / "out").to_pylist()
    assert [row["completion"] for row in rows[:2]] == [truth.chat(user(text)) for text in TEXTS[:2]]
    assert [row["error"] for row in rows[:2]] == [None, None]
    assert "System role not supported" in rows[2]["error"]
    assert (workers.folder / "out" / "_SUCCESS").exists()
    assert leftovers(workers.redis, "bulk") == []
