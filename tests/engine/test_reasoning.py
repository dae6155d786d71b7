"""Reasoning spans: parted from the answer, and closed when they have as many tokens as they may."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from engine import Engine, EngineConfig, InvalidSampling, SamplingParams
from engine.text import marked_text
from engine.text.control_tokens import BREAK
from engine.text.reasoning import LeadingSpan, Mark, Marks, Reasoner, Span, span_at_end, split
from engine.text.stop_strings import IncrementalText, StopStrings
from engine.text.tokenizer import Tokenizer
from tests.engine.text_models import make_text_model

THINK = ("<think>", "</think>")
MARKS = Marks(*(Mark(text, ()) for text in THINK))
GREEDY = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=70, temperature=1.5, seed=7, ignore_eos=True)
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if thinking is defined and not thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


def with_marks(source: Path, folder: Path, *, special: bool = False) -> Path:
    """A checkpoint whose tokenizer has the marks as tokens, and whose template opens a span."""
    shutil.copytree(source, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(list(THINK), special_tokens=special)
    tokenizer.chat_template = OPENING
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_marks(folders["gqa2_tied_hub"], tmp_path_factory.mktemp("marks") / "model")


def start(folder: Path, **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_bytes": 1 << 22,
        "block_size": 4,
        "max_num_seqs": 8,
    } | changes
    return Engine(EngineConfig(str(folder), **values))


@pytest.fixture(scope="module", params=[False, True], ids=["in turns", "overlapping"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with start(model, async_scheduling=request.param) as built:
        yield built


def by_hand(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    """What a completion must be: each token asked for alone, and the end mark put in after the budget."""
    start_id, end_id = (engine._tokenizer.added_tokens[text].token_id for text in THINK)
    text = engine._tokenizer.decode(prompt, skip_special_tokens=False).rstrip()
    left = params.thinking_token_budget if text.endswith(THINK[0]) else None
    alone = replace(params, max_tokens=1, thinking_token_budget=None)
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + params.max_tokens:
        if left == 0:
            token_ids.append(end_id)
        else:
            (one,) = engine.generate([token_ids], alone)
            token_ids += one.token_ids
        if token_ids[-1] == end_id:
            left = None
        elif token_ids[-1] == start_id and left is None:
            left = params.thinking_token_budget
        elif left is not None:
            left -= 1
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("budget", [0, 2])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_span_that_the_template_opens_has_so_many_tokens(
    engine: Engine, params: SamplingParams, budget: int
) -> None:
    end_id = engine._tokenizer.added_tokens[THINK[1]].token_id
    prompt = engine.chat_token_ids([{"role": "user", "content": "hi"}])
    params = replace(params, thinking_token_budget=budget)
    (completion,) = engine.generate([prompt], params)
    assert completion.token_ids == by_hand(engine, prompt, params)
    assert completion.token_ids.index(end_id) == budget
    assert len(completion.token_ids) == params.max_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [0, 1])
def test_an_end_mark_of_several_tokens_is_forced_whole(
    folder: Path, budget: int, overlap: bool
) -> None:
    with start(folder, async_scheduling=overlap) as engine:
        params = replace(
            GREEDY, thinking_token_budget=budget, reasoning_marks=THINK, separate_reasoning=True
        )
        mark = engine._tokenizer.encode_behind(THINK[1])
        assert len(mark) > 1
        (completion,) = engine.generate(["Hello <think>\n"], params)
        assert completion.token_ids[budget : budget + len(mark)] == mark
        assert (
            completion.token_ids[:budget]
            == engine.generate(["Hello <think>\n"], replace(GREEDY, max_tokens=max(budget, 1)))[
                0
            ].token_ids[:budget]
        )
        whole = engine._tokenizer.decode(completion.token_ids, follows_text=True)
        inner, _, after = whole.partition(THINK[1])
        assert (completion.reasoning, completion.text) == (inner.strip("\n"), after.lstrip("\n"))
        behind = engine.generate(
            [[*engine.prepare("Hello <think>\n").token_ids, *completion.token_ids[:-5]]],
            replace(GREEDY, max_tokens=5),
        )
        assert behind[0].token_ids == completion.token_ids[-5:], (
            "keys and values are those of the forced tokens"
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("changes", "num_tokens", "reason"),
    [
        ({"max_tokens": 1}, 1, "length"),
        ({"stop": [THINK[1]]}, None, "stop"),
        ({"stop_token_ids": "end"}, 1, "stop"),
        ({"stop_token_ids": "end", "min_tokens": 5}, None, "length"),
    ],
)
def test_a_forced_token_may_be_the_last(
    model: Path, changes: dict[str, Any], num_tokens: int | None, reason: str, overlap: bool
) -> None:
    with start(model, async_scheduling=overlap) as engine:
        if "stop_token_ids" in changes:
            changes = changes | {
                "stop_token_ids": [engine._tokenizer.added_tokens[THINK[1]].token_id]
            }
        prompt = engine.chat_token_ids([{"role": "user", "content": "hi"}])
        params = replace(GREEDY, max_tokens=6, thinking_token_budget=0)
        for each in (params, replace(params, thinking_token_budget=1)):
            (completion,) = engine.generate([prompt], replace(each, **changes))
            if num_tokens is not None and (each is params or reason == "length"):
                assert len(completion.token_ids) == num_tokens
                assert completion.finish_reason == reason
        assert engine.stats().free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("separate", [True, False])
def test_a_stop_string_within_the_reasoning_does_not_end_the_answer(
    engine: Engine, separate: bool
) -> None:
    prompt = engine.chat_token_ids([{"role": "user", "content": "hi"}])
    params = replace(DRAWN, thinking_token_budget=6, separate_reasoning=True)
    (whole,) = engine.generate([prompt], params)
    assert whole.reasoning
    stop = whole.reasoning[:2]
    (stopped,) = engine.generate([prompt], replace(params, stop=stop, separate_reasoning=separate))
    text = stopped.text if separate else stopped.text.partition(THINK[1])[2].lstrip("\n")
    assert text == whole.text.partition(stop)[0]
    assert stopped.finish_reason == ("stop" if stop in whole.text else "length")
    assert len(stopped.token_ids) > 6


@pytest.mark.parametrize("kind", ["characters", "a token", "a hidden token"])
@pytest.mark.parametrize(
    ("span", "text", "stop", "wanted"),
    [
        (Span.OPEN, "a.b</think>c.d", ".", "a.b</think>c"),
        (Span.OPEN, "a\n\nb</think>\n\nc\n\nd", "\n\n", "a\n\nb</think>\n\nc"),
        (Span.OPEN, "<think>a.</think>b.", ".", "<think>a.</think>b"),
        (Span.NONE, "\n<think>a.</think>\nb.", ".", "\n<think>a.</think>\nb"),
        (Span.NONE, "<think>a.", ".", None),
        (Span.NONE, "<b>.", ".", "<b>"),
        (Span.NONE, "<t.", "<t", ""),
        (Span.NONE, "\n\na", "\n\n", ""),
        (Span.NONE, "a <think>b.</think>", ".", "a <think>b"),
        (Span.CLOSED, "\n.<think>", ".", "\n"),
    ],
)
def test_stop_strings_count_from_where_the_answer_begins(
    span: Span, text: str, stop: str, wanted: str | None, kind: str
) -> None:
    """Whether a mark is the characters of several tokens, or one token that the text shows or hides."""
    ids = {} if kind == "characters" else {"<think>": 1, "</think>": 2}
    shown = {1: "", 2: ""} if kind == "a hidden token" else {1: THINK[0], 2: THINK[1]}
    marks = Marks(*(Mark(mark, (), ids.get(mark)) for mark in THINK))
    decoded = IncrementalText(lambda each: "".join(shown.get(token, chr(token)) for token in each))
    watch = StopStrings(
        [stop], decoded, min_tokens=0, answer_part=LeadingSpan(marks, span).answer_part
    )
    pieces = re.split("(</?think>)", text) if ids else [text]
    tokens = [
        token for piece in pieces for token in ([ids[piece]] if piece in ids else map(ord, piece))
    ]
    assert any(watch.add(token) for token in tokens) == (wanted is not None)
    if wanted is not None and kind == "a hidden token":
        wanted = re.sub("</?think>", "", wanted)
    assert watch.text == wanted


def test_a_model_without_marks_refuses_a_budget_by_name(folder: Path) -> None:
    with start(folder) as engine:
        with pytest.raises(
            InvalidSampling, match=r"thinking_token_budget needs the marks.*give reasoning_marks"
        ):
            engine.add("a", [1], replace(GREEDY, thinking_token_budget=1))
        assert not engine.has_unfinished
        (plain,) = engine.generate([[1, 2]], replace(GREEDY, separate_reasoning=True))
        assert plain.reasoning is None


@pytest.mark.parametrize(
    "values",
    [
        {"thinking_token_budget": -1},
        {"thinking_token_budget": True},
        {"reasoning_marks": "<think>"},
        {"reasoning_marks": ["a", "a"]},
        {"reasoning_marks": ["a\n", "b"]},
        {"reasoning_marks": ["a", "b" * 65]},
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("text", "span", "reasoning", "rest"),
    [
        ("<think>\nwhy\n</think>\n\nyes", Span.NONE, "why", "yes"),
        ("why\n</think>\n\nyes", Span.OPEN, "why", "yes"),
        ("why, still", Span.OPEN, "why, still", ""),
        ("<think>why, still", Span.NONE, "why, still", ""),
        ("yes", Span.NONE, None, "yes"),
        ("", Span.OPEN, "", ""),
        ("why</think>yes", Span.NONE, "why", "yes"),
        ("so <think>why</think>yes", Span.NONE, "why", "so yes"),
        ("why</think>write </think> so", Span.OPEN, "why", "write </think> so"),
        ("it is </think>", Span.CLOSED, None, "it is </think>"),
    ],
)
def test_a_text_is_parted_at_its_marks(
    text: str, span: Span, reasoning: str | None, rest: str
) -> None:
    assert split(text, MARKS, span) == (reasoning, rest)


def test_a_text_that_may_begin_a_mark_of_several_tokens_waits() -> None:
    marks = Marks(*(Mark(mark, ()) for mark in THINK))
    decoded = IncrementalText(lambda each: "".join(map(chr, each)))
    watch = StopStrings(
        ["<"], decoded, min_tokens=0, answer_part=LeadingSpan(marks, Span.NONE).answer_part
    )
    assert not watch.add(ord("<"))
    assert watch.add(ord("b"))


#: The prompt's end, the completion, its reasoning and its answer. A spelled mark begins with "!".
SPELLED = [
    ("", ["The tag ", "!</think>", " ends it"], None, "The tag </think> ends it"),
    ("", ["Write ", "!<think>", "x", "!</think>", "."], None, "Write <think>x</think>."),
    ("", ["<think>", "say ", "!</think>", " it", "</think>", "Yes"], "say </think> it", "Yes"),
    (
        "<think>",
        ["say ", "!</think>", " it", "</think>", "a ", "!</think>"],
        "say </think> it",
        "a </think>",
    ),
    (
        "",
        ["<think>", "r", "</think>", "Use ", "!<think>", " and ", "!</think>"],
        "r",
        "Use <think> and </think>",
    ),
    ("!<think>", ["Yes"], None, "Yes"),
]


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("prompt", "pieces", "reasoning", "answer"), SPELLED)
def test_text_that_spells_a_mark_is_no_mark(
    tmp_path: Path,
    prompt: str,
    pieces: list[str],
    reasoning: str | None,
    answer: str,
    is_special: bool,
) -> None:
    """Where a mark is a token, only this token counts, for what is split off and for stop strings."""
    make_text_model(tmp_path, "qwen")
    made = Tokenizer(tmp_path)._tokenizer
    made.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in THINK])
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    reasoner = Reasoner(tokenizer, 10_000)

    def ids_of(piece: str) -> list[int]:
        if piece.startswith("!"):
            return [token_id for char in piece[1:] for token_id in tokenizer.encode_alone(char)]
        return tokenizer.encode_alone(piece)

    prompt_ids = ids_of(prompt)
    token_ids = [token_id for piece in pieces for token_id in ids_of(piece)]
    marks = reasoner.marks(())
    text = marked_text.with_marks(
        tokenizer,
        tokenizer.decode(token_ids),
        token_ids,
        marks,
        broken=marks.values(),
        follows_text=False,
    )
    parts = [part and part.replace(BREAK, "") for part in reasoner.split(text, (), prompt_ids)]
    assert parts == [reasoning, answer]
    span = reasoner.answer_span((), prompt_ids, ["Z"])
    assert isinstance(span, LeadingSpan)
    decoded = tokenizer.incremental_text(follows_text=False)
    assert (
        "".join(span.answer_part(token_id, decoded.add(token_id)) for token_id in token_ids)
        == answer
    )


@pytest.mark.parametrize(
    ("prompt", "span"),
    [
        ("<|im_start|>assistant\n<think>\n", Span.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Span.CLOSED),
        ("what is <think>?<|im_start|>assistant\n", Span.NONE),
        ("", Span.NONE),
    ],
)
def test_a_prompts_end_says_whether_the_span_is_open(prompt: str, span: Span) -> None:
    assert span_at_end(prompt, MARKS) is span


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("marks", [(), ("<brood>", "</brood>")], ids=["one token", "several"])
def test_forced_tokens_have_their_own_log_probabilities(
    model: Path, overlap: bool, marks: tuple[str, ...]
) -> None:
    """Those that the model gives them, the last token's too; with bans, biases and penalties beside them."""
    changes: list[dict[str, Any]] = [
        {}, {"max_tokens": 3}, {"temperature": 0.0}, {"presence_penalty": 1.0}, {"logit_bias": {7: -100.0}},
        {"min_tokens": 6}, {"ignore_eos": False, "min_tokens": 9}, {"max_tokens": 1},
    ]  # fmt: skip
    with start(model, async_scheduling=overlap) as engine:
        end_ids = engine._tokenizer.encode_behind((marks or THINK)[1])
        prompt = engine.prepare(f"some text {(marks or THINK)[0]}").token_ids
        for budget in (0, 1, 4):
            params = [
                replace(
                    DRAWN,
                    max_tokens=12,
                    logprobs=2,
                    thinking_token_budget=budget,
                    reasoning_marks=marks,
                )
            ] * len(changes)
            params = [replace(each, **change) for each, change in zip(params, changes, strict=True)]
            for completion in engine.generate([prompt] * len(params), params):
                forced = completion.token_ids[budget : budget + len(end_ids)]
                assert forced == end_ids[: len(forced)]
                assert completion.logprobs is not None
                assert len(completion.logprobs) == len(completion.token_ids)
                whole = [*prompt, *completion.token_ids]
                (scored,) = engine.generate(
                    [whole], replace(GREEDY, max_tokens=1, prompt_logprobs=2)
                )
                assert scored.prompt_logprobs is not None
                for token_id, found, wanted in zip(
                    completion.token_ids,
                    completion.logprobs,
                    scored.prompt_logprobs[len(prompt) :],
                    strict=True,
                ):
                    assert wanted is not None
                    assert found[token_id].logprob == pytest.approx(
                        wanted[token_id].logprob, abs=1e-4
                    )
                    assert found[token_id].rank == wanted[token_id].rank
