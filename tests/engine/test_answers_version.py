"""Answers of one ANSWERS_VERSION have the same bits: prompts, sampled tokens, scores and texts of the demo's model."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.fingerprint import ANSWERS_VERSION

MODEL = Path("ops/demo/model")
WHAT_TO_DO = (
    "the code answers otherwise than before. If that is meant, raise ANSWERS_VERSION in "
    "engine/checkpoint/fingerprint.py by one, and write the new bits here: answers of before are then another model's"
)
CHAT = [{"role": "user", "content": "the 3rd of March, '87"}]
CHATS: list[list[dict[str, Any]]] = [
    CHAT,
    [
        {"role": "system", "content": "Read dates."},
        {"role": "user", "content": [{"type": "text", "text": "1 May"}]},
    ],
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "hot": {"temperature": 3.0, "seed": 11},
    "top_k": {"temperature": 3.0, "top_k": 5, "seed": 3},
    "top_p": {"temperature": 3.0, "top_p": 0.7, "seed": 4},
    "min_p": {"temperature": 3.0, "min_p": 0.01, "seed": 5},
    "penalties": {
        "temperature": 2.0,
        "seed": 6,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
    },
    "presence": {"temperature": 2.0, "seed": 8, "presence_penalty": 1.0, "min_tokens": 6},
    "stop string": {"temperature": 0.0, "stop": ["-0"]},
    "pattern": {"temperature": 2.0, "seed": 9, "structured_outputs": {"regex": "[a-f]{8}"}},
    "choice": {
        "temperature": 2.0,
        "seed": 10,
        "structured_outputs": {"choice": ["yes", "no", "maybe"]},
    },
    "forced": {
        "temperature": 2.0,
        "seed": 12,
        "structured_outputs": {"json": {"const": {"year": 1987}}},
    },
}
EXPECTED: dict[str, Any] = {
    "chat 0": [126, "9ef4139a61043d46"],
    "chat 1": [32, "4c220b9c509f6fc2"],
    "greedy": ["stop", "1987-03-03", [19, 27, 26, 25, 15, 18, 21, 15, 18, 21, 2]],
    "seeded": ["stop", "1987-03-03", [19, 27, 26, 25, 15, 18, 21, 15, 18, 21, 2]],
    "hot": [
        "length",
        "van misó em month: SeedigATeek (",
        [454, 387, 507, 413, 398, 28, 426, 300, 442, 508, 369, 303],
    ],
    "top_k": ["stop", "1987-03-03", [19, 27, 26, 25, 15, 18, 21, 15, 18, 21, 2]],
    "top_p": [
        "length",
        "198�h ( write YYYY el writexpires ab",
        [19, 27, 26, 253, 74, 303, 390, 400, 350, 390, 494, 500],
    ],
    "min_p": ["stop", "1980-1 Aprilinh19", [19, 27, 26, 18, 15, 19, 345, 279, 74, 19, 27, 2]],
    "penalties": [
        "length",
        "19 A1-03-03 in te",
        [19, 27, 295, 19, 15, 18, 21, 15, 18, 21, 331, 371],
    ],
    "presence": ["stop", "1987-03-03", [19, 27, 26, 25, 15, 18, 21, 15, 18, 21, 2]],
    "stop string": ["stop", "1987", [19, 27, 26, 25, 15, 18]],
    "pattern": ["stop", "fdafeeed", [72, 274, 458, 71, 300]],
    "choice": ["stop", "no", [277]],
    "forced": ["stop", '{"year":1987}', [93, 4, 91, 319, 4, 28, 19, 27, 26, 25, 95]],
    "samples": [[19, 27, 343, 376, 240, 423], [19, 27, 26, 352, 28, 24]],
    "scores": [[11, False, -27.74], [11, False, -38.37]],
}


def bits(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, messages in enumerate(CHATS):
        token_ids = engine.chat_token_ids(messages)
        found[f"chat {number}"] = [
            len(token_ids),
            blake2b(str(token_ids).encode(), digest_size=8).hexdigest(),
        ]
    prompt = engine.chat_token_ids(CHAT)
    for name, values in SAMPLINGS.items():
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=12, **values))
        found[name] = [completion.finish_reason, completion.text, list(completion.token_ids)]
    samples = engine.generate([prompt], SamplingParams(max_tokens=6, n=2, temperature=3.0, seed=2))
    found["samples"] = [list(each.token_ids) for each in samples]
    scores = engine.loglikelihood(
        [("3 March 1987 ->", " 1987-03-03"), ("3 March 1987 ->", " 1987-03-04")]
    )
    found["scores"] = [[each.num_tokens, each.is_greedy, round(each.logprob, 2)] for each in scores]
    return found


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_answers_have_the_bits_of_their_version(backend: str) -> None:
    config = EngineConfig(
        str(MODEL), dtype="float32", attention_backend=backend, kv_cache_bytes=16 << 20
    )
    with Engine(config) as engine:
        found = bits(engine)
    assert ANSWERS_VERSION == 3, WHAT_TO_DO
    assert found.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert found[name] == expected, f"{name}: {WHAT_TO_DO}"
