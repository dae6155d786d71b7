"""Prompts with pictures: greedy tokens are transformers' own, whatever is cut, preempted or found in the cache."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    Engine,
    InvalidPrompt,
    RequestParams,
    SamplingParams,
    ScoringParams,
    UnsupportedTask,
)
from engine.run.check_up import check_up
from engine.text.tokenizer import Tokenizer
from tests.engine.family_runs import GREEDY, config_of
from tests.engine.picture_models import PictureReference, make_with_pictures, picture, prompts

#: Beside family_runs.MODES.
SIX: dict[str, dict[str, Any]] = {
    "whole": {},
    "uncached": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "preempted": {"pool_blocks": 12},
    "all": {"pool_blocks": 12, "max_num_batched_tokens": 24, "max_num_seqs": 6},
    "other batches": {"max_num_seqs": 3},
}
References = Callable[[str], PictureReference]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    made: dict[str, PictureReference] = {}

    def reference(name: str) -> PictureReference:
        if name not in made:
            made[name] = PictureReference(
                make_with_pictures(tmp_path_factory.mktemp(name), name), name
            )
        return made[name]

    return reference


#: One of each mechanism: rows alone, three positions, features by layer, blocks, tiles, states.
NAMES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "qwen3_5")
SHORT = ("llava", "qwen3_vl", "gemma3")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if mode == "all" and name in SHORT else pytest.mark.long)
        for name in NAMES
        for mode in SIX
    ],
)
def test_greedy_tokens_equal_transformers(references: References, name: str, mode: str) -> None:
    reference = references(name)
    block_bytes = 4096 if name == "qwen3_5" else None  # of its only layer with a KV cache
    with Engine(
        config_of(reference.folder, "whole", block_bytes=block_bytes, **SIX[mode])
    ) as engine:
        assert engine.reads_pictures
        completions = engine.generate(prompts(), GREEDY)
        stats = engine.stats()
    assert reference.unexplained(completions) == []
    assert stats.num_preemptions > 0 or mode != "preempted"
    assert (stats.cached_tokens > 0) == (mode != "uncached")


def test_a_prefix_is_found_behind_the_same_picture_alone(references: References) -> None:
    text = "a text that is long enough to fill some blocks of the cache by itself"
    with Engine(config_of(references("llava").folder, "whole")) as engine:
        first, same, other = (
            engine.generate([[picture(seed), text]], GREEDY)[0].num_cached_tokens
            for seed in (1, 1, 2)
        )
    assert (first, other) == (0, 0)
    assert same > 16


def test_equal_pictures_are_looked_at_once(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(config_of(references("llava").folder, "whole")) as engine:
        assert engine._picture_queue is not None
        tower, seen = engine._picture_queue._tower, []
        compute = tower._compute
        monkeypatch.setattr(tower, "_compute", lambda **inputs: seen.append(1) or compute(**inputs))
        engine.generate([[picture(7), f"number {i}", picture(8)] for i in range(5)], GREEDY)
        engine.generate([[picture(7), "again"]], SamplingParams(max_tokens=2, n=3))
    assert len(seen) == 2


def test_texts_go_on_and_a_broken_picture_costs_its_request(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references("llava")
    with Engine(config_of(reference.folder, "whole")) as engine:
        assert engine._picture_queue is not None
        tower = engine._picture_queue._tower
        compute, num_calls = tower._compute, []

        def broken(**inputs: Any) -> Any:
            num_calls.append(1)
            if len(num_calls) == 2:
                raise RuntimeError("this one is broken")
            return compute(**inputs)

        monkeypatch.setattr(tower, "_compute", broken)
        found = engine.generate([[picture(5)], [picture(6)], "text", [picture(5), "x"]], GREEDY)
        assert [each.finish_reason for each in found] == ["length", "error", "length", "length"]
        assert "this one is broken" in str(found[1].error)
        engine.add("late", [picture(9), "x"], GREEDY)
        engine.add("text", "text", GREEDY)
        monkeypatch.setattr(
            "engine.run.forward.pictures.waiting.MAX_READY", 0
        )  # as if none could be looked at yet
        while not (done := engine.step()):
            pass
        assert [each.request_id for each in done] == ["text"]
        assert engine.stats().num_waiting == 1
        monkeypatch.undo()
        while not (done := engine.step()):
            pass
        assert [each.request_id for each in done] == ["late"]


def test_a_chat_with_pictures_is_the_prompt_that_its_template_makes(references: References) -> None:
    with Engine(config_of(references("qwen3_vl").folder, "whole")) as engine:
        parts = [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what is it?"}]
        chat = engine.prepare_chat(
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
        )
        before = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
        behind = "what is it?<|im_end|>\n<|im_start|>assistant\n"
        plain = engine.prepare([before, picture(1), behind])
        assert chat.token_ids == plain.token_ids
        assert chat.block_keys == plain.block_keys
        assert engine.prepare_chat(
            [{"role": "user", "content": "hi"}]
        ).token_ids == engine.chat_token_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (["a", picture(1)], SamplingParams(truncate_prompt_tokens=5), "are not cut"),
        (["a", picture(1)], ScoringParams(["b"], truncate_prompt_tokens=5), "are not cut"),
        (["a <image_token>", picture(1)], SamplingParams(), "2 in the text, 1 came"),
        ("a <image_token> b", SamplingParams(), "stands for a picture, and none came"),
        ("a <image_token> b", ScoringParams(["b"]), "stands for a picture, and none came"),
        ([picture(1).astype("float32")], SamplingParams(), r"uint8, got \[40, 60, 3\] of float32"),
        ([picture(1)[..., 0]], SamplingParams(), r"\[height, width, 3\]"),
        ([picture(1), 5], SamplingParams(), "texts and pictures, got int"),
    ],
)
def test_impossible_prompts_are_refused(
    references: References, prompt: Any, params: RequestParams, words: str
) -> None:
    with (
        Engine(config_of(references("llava").folder, "whole")) as engine,
        pytest.raises(InvalidPrompt, match=words),
    ):
        engine.prepare(prompt, params)


def test_a_model_without_its_processor_reads_text_alone(
    references: References, tmp_path: Path
) -> None:
    reference = references("llava")
    with Engine(config_of(reference.folder, "whole", model_path="native")) as engine:
        assert not engine.reads_pictures
        with pytest.raises(UnsupportedTask, match="reads no pictures"):
            engine.prepare(["a", picture(1)])
        with pytest.raises(UnsupportedTask, match="reads no pictures"):
            engine.prepare_chat(
                [{"role": "user", "content": [{"type": "image", "image": picture(1)}]}]
            )


def test_continuations_are_scored_behind_pictures(references: References) -> None:
    reference = references("qwen3_vl")
    prompt = ["is ", picture(1), " like ", picture(2, 70, 40), "?"]
    with Engine(config_of(reference.folder, "chunks")) as engine:
        scores = engine.generate([prompt], ScoringParams(["a", "e"]))[0].loglikelihoods
        assert scores is not None
        tokens = [engine.prepare(text).token_ids for text in ("a", "e")]
    with torch.inference_mode():
        expected = (
            reference.model(**reference.inputs(prompt), use_cache=False)
            .logits[0, -1]
            .log_softmax(-1)
        )
    assert [each.logprob for each in scores] == pytest.approx(
        [float(expected[i]) for (i,) in tokens], abs=1e-4
    )


def test_a_generated_placeholder_stands_for_no_picture(references: References) -> None:
    """In a step with another prompt's pictures too."""
    reference = references("qwen3_vl")
    with Engine(config_of(reference.folder, "chunks")) as engine:
        assert engine._reader is not None
        biased = SamplingParams(
            max_tokens=6, temperature=0.0, logit_bias={engine._reader.placeholder_id: 100.0}
        )
        many = [["a ", picture(seed), " b ", picture(seed + 1)] for seed in range(9)]
        alone = engine.generate(many[:1], biased)[0]
        together = engine.generate(many, [biased, *[GREEDY] * 8])
    assert alone.token_ids == together[0].token_ids == [engine._reader.placeholder_id] * 6
    assert all(each.finish_reason == "length" for each in together)


def test_a_cut_completion_goes_on_behind_pictures(references: References) -> None:
    reference = references("qwen3_vl")
    answer = reference.answers[0][0]
    with Engine(config_of(reference.folder, "all")) as engine:
        engine.add(
            "cut", prompts()[0], replace(GREEDY, max_tokens=len(answer) - 5), continued=answer[:5]
        )
        while not (done := engine.step()):
            pass
    assert done[0].token_ids == answer


def test_a_hostile_processor_runs_nothing_and_fetches_nothing(
    references: References, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(references("llava").folder, folder)
    path = folder / "processor_config.json"
    values = json.loads(path.read_text())
    elsewhere = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "../evil"}
    path.write_text(
        json.dumps(
            {**values, "audio_tokenizer": elsewhere, "auto_map": {"AutoProcessor": "evil.Evil"}}
        )
    )
    with Engine(config_of(folder, "whole")) as engine:
        assert engine.reads_pictures
    assert any(each.text.startswith("LlavaFor") for each in check_up(config_of(folder, "whole")))
    path.write_text(json.dumps({**values, "processor_class": "AutoModelForCausalLM"}))
    with Engine(config_of(folder, "whole")) as engine:
        assert not engine.reads_pictures
    assert "LlavaForConditionalGeneration is served for text alone" in caplog.text


def test_pictures_that_see_each_other_are_refused_where_that_is_not_exact(
    references: References,
) -> None:
    with Engine(config_of(references("gemma3").folder, "whole")) as engine:
        with pytest.raises(InvalidPrompt, match=r"ends at token \d+: .* windows of 100 tokens"):
            engine.prepare(["0123456789" * 11, picture(1)])
        assert engine.prepare([picture(1), "0123456789" * 11]).pictures is not None


def test_no_prefix_is_found_that_ends_inside_a_picture(references: References) -> None:
    """Nor inside an earlier one, where the cut before a picture leads there."""
    parts = ["abcdefghi", picture(1), "jklmn", picture(2), " the end of it, long enough"]
    with Engine(config_of(references("gemma3").folder, "whole")) as engine:
        prepared = engine.prepare(parts).pictures
        assert prepared is not None
        assert [[first < end < last for first, last in prepared.blocks] for end in (16, 32)] == [
            [1, 0],
            [0, 1],
        ]
        found = [
            engine.generate([each], GREEDY)[0].num_cached_tokens
            for each in ([*parts[:-1], "."], parts, parts)
        ]
        assert found == [0, 0, 48]


def test_an_urgent_picture_does_not_wait_for_those_of_other_lanes(references: References) -> None:
    with Engine(config_of(references("llava").folder, "whole", max_num_seqs=1)) as engine:
        for number in range(40):
            engine.add(
                f"{number}",
                ["a", picture(number)],
                SamplingParams(max_tokens=40, ignore_eos=True),
                lane=1,
            )
        for _ in range(20):
            engine.step()
        engine.add("urgent", ["b", picture(99)], GREEDY, lane=0)
        for _ in range(4):
            engine.step()
        assert "urgent" in engine.progress()


def test_the_compiled_kernels_see_pictures_whole_too(references: References) -> None:
    reference = references("gemma3")
    with Engine(config_of(reference.folder, "chunks", "cpu")) as engine:
        assert reference.unexplained(engine.generate(prompts(), GREEDY)) == []


def test_a_template_that_reads_parts_alone_gets_texts_as_parts(
    references: References, tmp_path: Path
) -> None:
    """As LLaVA's, which leaves out what is no part."""
    folder = tmp_path / "model"
    shutil.copytree(references("llava").folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
        "<image_token>\n{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    tokenizer = Tokenizer(folder)
    assert (
        tokenizer.chat_text(
            [{"role": "user", "content": "hi"}, {"role": "user", "content": " you"}]
        )
        == "hi you"
    )
