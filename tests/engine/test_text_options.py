"""What of a prompt is read, and what of a completion is written: options of each request."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine import Completion, Engine, EngineConfig, InvalidPrompt, PromptTooLong, SamplingParams
from engine.text.stop_strings import StopStrings
from engine.text.tokenizer import Tokenizer
from tests.engine.checkpoints import make_tokenizer

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path]) -> Iterator[Engine]:
    with Engine(
        EngineConfig(
            str(folders["gqa2_tied_hub"]), dtype="float32", kv_cache_bytes=1 << 21, max_model_len=64
        )
    ) as built:
        yield built


def complete(engine: Engine, prompt: str | list[int], params: SamplingParams) -> Completion:
    (completion,) = engine.generate([prompt], params)
    return completion


def forced(token_ids: list[int]) -> SamplingParams:
    """Values with which these tokens are chosen, one after the other, none of them twice."""
    bias = {token_id: 100.0 - 3 * i for i, token_id in enumerate(token_ids)}
    return replace(
        GREEDY, max_tokens=len(token_ids), logit_bias=bias, allowed_token_ids=token_ids,
        repetition_penalty=1_000_000,
    )  # fmt: skip


def test_special_tokens_are_left_in_the_text_on_wish(shared: Engine) -> None:
    tokenizer = make_tokenizer()
    ids = [*tokenizer.encode(" th")[:1], 0, 2, *tokenizer.encode("q")[:1], 1]
    hidden = complete(shared, [5, 6], forced(ids))
    assert hidden.token_ids == ids
    assert hidden.text == tokenizer.decode(ids, skip_special_tokens=True)
    visible = complete(shared, [5, 6], replace(forced(ids), skip_special_tokens=False))
    assert visible.text == tokenizer.decode(ids, skip_special_tokens=False)
    assert "<|endoftext|><|im_end|>" in visible.text
    ended = replace(forced(ids), skip_special_tokens=False, ignore_eos=False)
    assert complete(shared, [5, 6], ended).text.endswith("<|im_end|>"), (
        "the end token is a token too"
    )


def word_tokenizer(folder: Path) -> Tokenizer:
    """Words with a space between any two tokens of a text, special ones too."""
    made = Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made.add_tokens([AddedToken("<tool>")])
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return Tokenizer(folder)


def test_spaces_between_special_tokens_go_on_wish(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path)
    ids = [0, 3, 4, 5, 1, 3, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a <s> </s> <tool> b <s> b"
    joined = tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == "a <s></s><tool> b <s> b"
    assert tokenizer.decode(ids, spaces_between_special_tokens=False) == "a <tool> b b"
    for stop, spaces, text in (("> </s>", True, "a <s> </s>"), ("></s>", False, "a <s></s>")):
        shown = tokenizer.incremental_text(
            follows_text=False, skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        watch = StopStrings([stop], shown, min_tokens=0, include=True)
        assert [watch.add(token_id) for token_id in ids[:3]] == [False, False, True]
        assert watch.text == text


def test_a_prompts_last_tokens_alone_are_read_on_wish(shared: Engine) -> None:
    """Of token ids, of a text, of a chat, prepared or not; one that is shorter stays as it is."""
    ids = [5 + i % 400 for i in range(50)]
    text = "the quick brown fox " * 3
    text_ids, chat_ids = make_tokenizer().encode(text), shared.chat_token_ids(HI)
    for prompt, tokens in ((ids, ids), (text, text_ids), (shared.prepare(ids), ids)):
        for most in (1, 7, 16, len(tokens), 63, 1000):
            completion = complete(shared, prompt, replace(GREEDY, truncate_prompt_tokens=most))  # type: ignore[arg-type]
            expected = complete(shared, tokens[-most:], GREEDY)
            assert completion.num_prompt_tokens == min(most, len(tokens))
            assert completion.token_ids == expected.token_ids
    assert shared.chat_token_ids(HI, truncate_prompt_tokens=4) == chat_ids[-4:]
    prepared = shared.prepare(text, replace(GREEDY, truncate_prompt_tokens=4))
    assert prepared.token_ids == text_ids[-4:]


def test_what_is_too_long_fits_when_it_is_truncated(shared: Engine) -> None:
    """To any number of tokens that leave room for one more, or to as many as do; to more than that it is too
    long as before."""
    most = shared.max_model_len - 1
    long_text, long_chat = "the quick brown fox " * 500, [{"role": "user", "content": "fox " * 500}]
    long_ids = [7] * 300
    for fits in (-1, most, 3):
        wanted = replace(GREEDY, truncate_prompt_tokens=fits)
        for prompt in (long_text, long_ids):
            completion = complete(shared, prompt, wanted)
            assert completion.finish_reason == "length"
            assert completion.num_prompt_tokens == (most if fits == -1 else fits)
        assert len(shared.chat_token_ids(long_chat, truncate_prompt_tokens=fits)) == (
            most if fits == -1 else fits
        )
    for limit in (None, most + 1):
        with pytest.raises(PromptTooLong):
            shared.prepare(long_ids, replace(GREEDY, truncate_prompt_tokens=limit))
        failed = complete(shared, long_text, replace(GREEDY, truncate_prompt_tokens=limit))
        assert failed.finish_reason == "error"
    for bad in ("", []):
        with pytest.raises(InvalidPrompt):
            shared.prepare(bad, replace(GREEDY, truncate_prompt_tokens=5))
