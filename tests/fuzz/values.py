"""Strategies for what comes from outside: JSON of any shape, and values that almost fit."""

import json
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from engine.sampling.sampling_params import NOT_BUILT, SamplingParams

TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(codec=None), max_size=8),  # halves of surrogate pairs too
    st.sampled_from(
        ["", "\0", "x" * 5000, "64", "{}", "..", "\ud83d", "null", "{prompt}", "🙂" * 300]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.builds(
        lambda sign, bits, beside: sign * 2**bits + beside,
        st.sampled_from([1, -1]),
        st.integers(0, 80),
        st.integers(-1, 1),
    ),
    st.just(10**400),
    st.floats(),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
SAMPLING = st.dictionaries(
    st.one_of(
        st.sampled_from([field.name for field in fields(SamplingParams)]),
        st.sampled_from(sorted(NOT_BUILT)),
        TEXTS,
    ),
    JSON,
    max_size=4,
)


_GOOD_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", ""]), "content": TEXTS}
)
_MESSAGE = st.one_of(
    _GOOD_MESSAGE,
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", ""]), JSON, max_size=3
    ),
    JSON,
)
MESSAGES = st.one_of(st.lists(_GOOD_MESSAGE, max_size=5), st.lists(_MESSAGE, max_size=4), JSON)

_NAMES = st.one_of(
    st.sampled_from(["jobs.complete", "jobs.chat", "jobs.score_shard", "jobs.score_parquet"]),
    st.sampled_from(["jobs.os.system", "os.getcwd", "", "jobs", "tests.worker.poison.touch"]),
    JSON,
)
_CALLS = st.one_of(
    st.builds(
        lambda name, prompt, sampling: [name, None, [prompt], sampling],
        st.sampled_from(["jobs.complete", "jobs.chat"]),
        st.one_of(TEXTS, MESSAGES, st.lists(st.integers(-2, 99), max_size=5)),
        SAMPLING,
    ),
    st.builds(
        lambda *call: list(call), _NAMES, st.none() | JSON, st.lists(JSON, max_size=4), SAMPLING
    ),
    st.builds(lambda *call: list(call), _NAMES, JSON, JSON, JSON),
    JSON,
)


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


PAYLOADS = st.one_of(_CALLS.map(_as_json), st.binary(max_size=40))
"""The field `data` of a job's hash: calls, almost calls, and bytes."""

_HASH_VALUES = st.one_of(
    SCALARS.map(lambda value: str(value).encode("utf-8", "surrogatepass")),
    JSON.map(_as_json),
    st.binary(max_size=12),
)
_FIELDS = (
    "timeout result_ttl failure_ttl ttl retry_intervals repeat_intervals meta created_at enqueued_at "
    "started_at dependency_ids sequences origin number_of_retries success_callback_name "
    "failure_callback_name webhooks group_id description result exc_info unknown"
)
_FEW_TIMES = st.sampled_from([b"1", b"2", b"-1", b"", b"many", b"1e3", b"\xff", b"[]"])
HASHES = st.builds(
    lambda damaged, again: {**damaged, **again},
    st.dictionaries(st.sampled_from(_FIELDS.split()), _HASH_VALUES, max_size=2),
    # Not as often as it may say: a job that asks for 2**63 runs gets them.
    st.dictionaries(st.sampled_from(["retries_left", "repeats_left"]), _FEW_TIMES, max_size=1),
)
"""Further fields of the hash, some of them damaged."""
