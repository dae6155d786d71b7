"""Without parallel calls a completion ends behind its first call of a tool, in each model's form of calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.run.kinds.generate import Completions
from engine.schedule.sequence import ENDS, Sequence
from engine.text.reasoning import Reasoner
from engine.text.tokenizer import Tokenizer
from tests.engine.test_forced_calls import make_tokenizer
from tests.engine.test_tool_calls import FORMS, TOOLS

TEXTS = [(form, text) for form, texts in FORMS.items() for text in texts]


def completed(tokenizer: Tokenizer, text: str, **values: Any) -> tuple[Any, str]:
    """Return the completion of a text's tokens, up to its end, and the text of these."""
    vocab_size = tokenizer.backend.get_vocab_size()
    completions = Completions(tokenizer, Reasoner(tokenizer, vocab_size))
    seq = Sequence("id", [1], SamplingParams(tools=TOOLS, max_tokens=1000, **values))
    if not seq.params.parallel_tool_calls:
        seq.ends_call = completions.call_watch(seq)
    token_ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    for token_id in token_ids:
        if seq.learn(token_id) is ENDS:
            break
    else:
        seq.finish_reason = "stop"
    seq.text = tokenizer.decode(seq.generated_token_ids, skip_special_tokens=True)
    written = tokenizer.decode(seq.generated_token_ids, skip_special_tokens=False)
    return completions.of(seq), written


@pytest.mark.parametrize(("form", "text"), TEXTS)
def test_a_completion_ends_behind_its_first_call(tmp_path: Path, form: str, text: str) -> None:
    tokenizer = make_tokenizer(tmp_path, "qwen", text, [], is_special=False)
    all_calls, whole = completed(tokenizer, text)
    one_call, cut = completed(tokenizer, text, parallel_tool_calls=False)
    assert len(all_calls.tool_calls) == 2
    assert one_call.tool_calls == all_calls.tool_calls[:1]
    assert one_call.finish_reason == "stop"
    assert whole.startswith(cut)
    is_list = "[" in text and form not in ("hermes", "qwen xml", "glm", "deepseek")
    assert is_list or "now" not in cut


def test_a_call_that_reasoning_speaks_of_ends_nothing(tmp_path: Path) -> None:
    template = "<think></think><tool_call></tool_call>"
    tokens = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer = make_tokenizer(tmp_path, "qwen", template, tokens, is_special=False)
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    text = f"<think>maybe {call % 1}?</think>{call % 2}{call % 3}"
    completion, _ = completed(tokenizer, text, separate_reasoning=True, parallel_tool_calls=False)
    (only,) = completion.tool_calls
    assert json.loads(only["arguments"]) == {"a": 2}


def test_braces_of_an_answer_end_nothing(tmp_path: Path) -> None:
    template = "<tool_call></tool_call>"
    tokenizer = make_tokenizer(tmp_path, "qwen", template, [], is_special=False)
    text = '{"a": [1]} and f(x) {"name": "nobody"} <b>'
    completion, written = completed(tokenizer, text, parallel_tool_calls=False)
    assert written == text
    assert completion.tool_calls is None
