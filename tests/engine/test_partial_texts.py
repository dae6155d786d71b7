"""The texts so far are beginnings of the completions' texts, at every step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams
from engine.engine import Engine

MODEL = Path("ops/demo/model")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(model=str(MODEL), device="cpu", max_num_seqs=8, kv_cache_bytes=1 << 26)
    with Engine(config) as started:
        yield started


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"stop": ["e", "200", "-0"], "min_tokens": 20},
        {"stop": ["ay"], "include_stop_str_in_output": True, "min_tokens": 20},
        {"separate_reasoning": True, "reasoning_marks": ("0", "5")},
        {"separate_reasoning": True, "reasoning_marks": ("00", "-")},
        {"separate_reasoning": True, "reasoning_marks": ("e", "o"), "stop": ["ar"]},
    ],
)
def test_a_text_so_far_is_a_beginning_of_the_text(engine: Engine, options: dict[str, Any]) -> None:
    for number in range(6):
        params = SamplingParams(
            max_tokens=80, temperature=1.3, seed=number, n=2, ignore_eos=True, **options
        )
        engine.add(str(number), f"{number + 1} May 2004 ->", params)

    seen: dict[tuple[str, int], list[Any]] = {}
    done = {}
    while engine.has_unfinished:
        for completion in engine.step():
            done[completion.request_id, completion.index] = completion
        texts = engine.texts_so_far([str(number) for number in range(7)])
        for request_id, samples in texts.items():
            for index, partial in samples.items():
                seen.setdefault((request_id, index), []).append(partial)

    assert len(done) == 12
    assert any(partial.text for partials in seen.values() for partial in partials)
    for key, partials in seen.items():
        for partial in partials:
            assert done[key].text.startswith(partial.text), (key, partial)
            assert (done[key].reasoning or "").startswith(partial.reasoning or ""), (key, partial)
    assert not engine.texts_so_far(["0"])


def test_a_request_with_tools_shows_nothing_before_its_end(engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    engine.add("tools", "1 May 2004 ->", SamplingParams(max_tokens=8, tools=[tool]))
    while engine.has_unfinished:
        engine.step()
        for partial in engine.texts_so_far(["tools"]).get("tools", {}).values():
            assert partial == (None, "", ())
