"""The sampler against a float64 reference, and Philox against its published vectors."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampling.draws import first_words, philox4x32
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows, sampling_row
from engine.sampling.sampling_params import COLUMNS, SamplingParams
from engine.sampling.sampling_rows import SamplingRows
from tests.engine.sampler_cases import rows_of


def sampling_rows(n: int, **values: Any) -> SamplingRows:
    """Each value is one for all rows, or one for each."""
    position = np.broadcast_to(np.asarray(values.pop("position", 0), np.uint64), (n,)).copy()
    rows = neutral_rows(n)
    for name, value in values.items():
        rows[name] = value
    return rows_of(SamplingBatch(rows, position))


def uniforms(rows: SamplingRows) -> list[float]:
    columns = (
        column.numpy().view(np.uint64) for column in (rows.seed, rows.position, rows.sample_index)
    )
    return ((first_words(*columns) + 0.5) / 2**32).tolist()


def test_a_row_carries_each_value_in_its_own_column() -> None:
    """None is narrowed, and the values of a row that nobody has set change nothing."""
    params = SamplingParams(temperature=0.5, top_p=0.25, top_k=2**31 - 1, min_p=0.125)
    rows = neutral_rows(2)
    rows[1] = sampling_row(params, -1, 127)
    for name in COLUMNS:
        assert rows[name].tolist() == [getattr(SamplingParams(), name), getattr(params, name)]
    assert rows["seed"].tolist() == [0, 2**64 - 1]
    assert rows["sample_index"].tolist() == [0, 127]


def reference_choice(
    logits: list[float], u: float, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[int, float]:
    """Straight from the definitions. Returns the token and how near u was to another choice."""
    if temperature == 0:
        return logits.index(max(logits)), 1.0
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    top = max(logits)
    weight = [math.exp((x - top) / temperature) for x in logits]
    order = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        order = order[:top_k]
    total, mass, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weight[i]
        if mass >= top_p * total and top_p < 1:
            break
    edge, cdf = 0.0, []
    for i in sorted(kept):
        edge += weight[i]
        cdf.append((edge, i))
    token = next(i for edge, i in cdf if edge > u * cdf[-1][0])
    return token, min(abs(edge / cdf[-1][0] - u) for edge, _ in cdf)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_random123(counter: Any, key: Any, expected: Any) -> None:
    """The known-answer vectors that Random123 publishes for Philox4x32-10."""
    words = philox4x32(
        *(tuple(np.array([word], np.uint64) for word in words) for words in (counter, key))
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_uniforms_differ_by_seed_position_and_sample() -> None:
    """Each of the three changes the number, high halves included; none is 0 or 1."""
    triples = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1)]
    seed, position, index = (np.array(column, np.uint64) for column in zip(*triples, strict=True))
    words = first_words(seed, position, index)
    assert len(set(words.tolist())) == len(triples)
    assert words.max() < 2**32
    many = np.array(uniforms(sampling_rows(10_000, seed=3, position=np.arange(10_000))))
    assert ((many > 0) & (many < 1)).all()
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(many.var() - 1 / 12) < 0.005


@pytest.mark.parametrize("vocab_size", [5, 61, 3000])
@pytest.mark.parametrize("ties", [False, True])
def test_choices_equal_a_float64_reference(vocab_size: int, ties: bool) -> None:
    """Every mix of temperature, top_k, top_p and min_p in one batch; with ties everywhere too."""
    rng = np.random.default_rng(vocab_size)
    mixes = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 1.0, 5.0)
        for top_k in (0, 1, 7, 4000)
        for top_p in (1.0, 0.9, 0.5, 0.01)
        for min_p in (0.0, 0.02, 0.4)
    ]
    logits = rng.normal(0, 2, (len(mixes), vocab_size)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*mixes, strict=True))
    rows = sampling_rows(
        len(mixes),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=np.arange(len(mixes)),
    )
    u = uniforms(rows)
    chosen = sample(torch.from_numpy(logits), rows)
    wrong = 0
    for i in range(len(mixes)):
        token, margin = reference_choice(
            logits[i].tolist(),
            u[i],
            temperature=float(np.float32(temperature[i])),
            top_k=int(top_k[i]),
            top_p=float(np.float32(top_p[i])),
            min_p=float(np.float32(min_p[i])),
        )
        wrong += chosen[i] != token and margin > 1e-6
    assert wrong == 0
