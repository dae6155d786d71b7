"""Random rows of logits and sampling values of every kind, and where a kernel chooses unlike the reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch, neutral_rows
from engine.sampling.sampling_rows import SamplingRows

Logits = NDArray[np.float32]
Choose = Callable[[Tensor, SamplingRows], Tensor]

ROWS_OF_A_CASE = 20
LARGEST_VOCAB = 152_000
TILES = (128, 4096)  # of the CPU's kernel, and of the GPU's
#: Shares of vocabularies up to a size, from the one before (100 at first).
VOCABS = ((0.92, 3_000), (0.985, 20_000), (1.0, LARGEST_VOCAB))
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class Case:
    """logits: [rows, vocabulary] of any floating dtype. kinds: a name for each row."""

    logits: Tensor
    rows: SamplingRows
    kinds: list[str]


def normal(rng: np.random.Generator, vocab_size: int) -> Logits:
    return rng.normal(0, 10.0 ** rng.uniform(-2, 1.2), vocab_size).astype(np.float32)


def tied(rng: np.random.Generator, vocab_size: int) -> Logits:
    """Few values, each of many tokens."""
    return np.round(rng.normal(0, rng.uniform(0.3, 3), vocab_size)).astype(np.float32)


def equal(rng: np.random.Generator, vocab_size: int) -> Logits:
    return np.full(vocab_size, rng.normal(), np.float32)


def banned(rng: np.random.Generator, vocab_size: int) -> Logits:
    """Some of minus infinity, at times all but a few."""
    return np.where(
        rng.random(vocab_size) < rng.choice([0.1, 0.9, 0.999]), -np.inf, normal(rng, vocab_size)
    )


def one_hot(rng: np.random.Generator, vocab_size: int) -> Logits:
    """One token, far above the others or alone; often at a tile's edge."""
    logits = np.full(vocab_size, rng.choice([-np.inf, -100.0, 0.0]), np.float32)
    edges = [
        0,
        vocab_size - 1,
        *(at for tile in TILES for at in (tile - 1, tile) if at < vocab_size),
    ]
    logits[rng.choice([*edges, int(rng.integers(vocab_size))])] = rng.choice([0.5, 60.0])
    return logits


def huge(rng: np.random.Generator, vocab_size: int) -> Logits:
    """Up to the largest that all dtypes have; differences of float32's own largest are tried in tests."""
    return rng.uniform(-6e4, 6e4, vocab_size).astype(np.float32)


def tiny(rng: np.random.Generator, vocab_size: int) -> Logits:
    """Around zero, of both signs, down to numbers below the smallest normal one."""
    size = 10.0 ** rng.uniform(-44, -1, vocab_size)
    logits: Logits = (size * rng.choice([-1, 0, 1], vocab_size)).astype(np.float32)
    return logits


def none(rng: np.random.Generator, vocab_size: int) -> Logits:
    """Nothing to choose from."""
    logits = normal(rng, vocab_size)
    if rng.random() < 0.3:
        logits[:] = -np.inf
    else:
        logits[rng.integers(vocab_size)] = rng.choice([np.nan, -np.nan, np.inf])
    return logits


KINDS: list[tuple[float, Callable[[np.random.Generator, int], Logits]]] = [
    (0.42, normal), (0.2, tied), (0.06, equal), (0.12, banned), (0.08, one_hot), (0.05, huge), (0.05, tiny),
    (0.02, none),
]  # fmt: skip


def pick(rng: np.random.Generator, choices: list[tuple[float, float]]) -> float:
    """One of the values, each with its share."""
    shares = [share for share, _ in choices]
    return choices[int(rng.choice(len(choices), p=np.array(shares) / sum(shares)))][1]


def parameters(rng: np.random.Generator, vocab_size: int) -> dict[str, float]:
    """Of one row, by the names of COLUMNS."""
    any_k, any_p = float(rng.integers(1, vocab_size + 1)), rng.uniform(0.01, 1)
    any_t, extreme_t = 10 ** rng.uniform(-1.3, 0.7), 10 ** rng.uniform(-44, 6)
    few = min(50, vocab_size)
    return {
        "temperature": pick(rng, [(8, 0.0), (70, any_t), (10, extreme_t), (12, 1.0)]),
        "top_k": pick(rng, [(10, 0), (2, 1), (2, any_k), (2, few), (1, vocab_size), (1, 2**31 - 1)]),
        "top_p": pick(rng, [(5, 1.0), (3, any_p), (1, 0.95), (0.5, 0.01), (0.3, 1 - 2**-24), (0.2, 1e-12)]),
        "min_p": pick(rng, [(7, 0.0), (1, 0.05), (1, 10 ** rng.uniform(-9, 0)), (0.3, 1.0)]),
    }  # fmt: skip


def rows_of(batch: SamplingBatch) -> SamplingRows:
    """A batch as the sampler takes it on a CPU."""
    return SamplingRows(
        **{name: torch.from_numpy(column) for name, column in batch.columns().items()}
    )


def make_case(rng: np.random.Generator, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Case:
    """Rows of random kinds and parameters over one vocabulary."""
    shares = np.array([share for share, _ in KINDS])
    makers = [KINDS[i][1] for i in rng.choice(len(KINDS), num_rows, p=shares / shares.sum())]
    logits = torch.from_numpy(np.stack([make(rng, vocab_size) for make in makers])).to(dtype)
    values = neutral_rows(num_rows)
    for row in values:
        for name, value in parameters(rng, vocab_size).items():
            row[name] = value
    values["seed"] = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    values["sample_index"] = rng.integers(0, 128, num_rows)
    position = rng.integers(0, 2**34, num_rows, dtype=np.uint64)
    batch = SamplingBatch(values, position)
    return Case(logits, rows_of(batch), [make.__name__ for make in makers])


def cases(seed: int, num_rows: int) -> Iterator[Case]:
    """Random ones with num_rows rows in all."""
    rng = np.random.default_rng(seed)
    while num_rows > 0:
        draw, low, high = rng.random(), 100, 100
        for share, size in VOCABS:
            low, high = high, size
            if draw < share:
                break
        vocab_size = int(np.exp(rng.uniform(np.log(low), np.log(high))))
        if rng.random() < 0.05:
            vocab_size = low + int(rng.integers(-1, 2)) if low != 100 else 128
        taken = min(num_rows, ROWS_OF_A_CASE if vocab_size < LARGEST_VOCAB // 8 else 3)
        yield make_case(rng, taken, vocab_size, DTYPES[int(rng.integers(len(DTYPES)))])
        num_rows -= taken


def by_triton(device: torch.device, **options: Any) -> Choose:
    """The kernels for GPUs. options: of choose_tokens."""
    from engine.kernels.gpu_sampler import choose_tokens

    def choose(logits: Tensor, rows: SamplingRows) -> Tensor:
        columns = [getattr(rows, each.name).to(device) for each in fields(rows)]
        with np.errstate(
            over="ignore"
        ):  # in the interpreter: what is far below the highest goes to -inf
            return choose_tokens(logits.to(device), columns, **options).cpu()

    return choose


def by_numba() -> Choose:
    """The kernel for CPUs, which is not compiled for float16: its logits go in as float32."""
    from engine.cpu_kernels.cpu_sampler import choose_tokens

    def choose(logits: Tensor, rows: SamplingRows) -> Tensor:
        logits = logits.float() if logits.dtype == torch.float16 else logits
        return choose_tokens(logits, list(vars(rows).values()))

    return choose


def differences(case: Case, choose: Choose) -> list[str]:
    """What the kernels choose otherwise than the reference, a line for each row."""
    found, expected = choose(case.logits, case.rows), sample(case.logits, case.rows)
    lines = []
    for i in (found != expected).nonzero().flatten().tolist():
        values = {each.name: getattr(case.rows, each.name)[i].item() for each in fields(case.rows)}
        shape = f"{case.kinds[i]}, {case.logits.shape[1]} tokens, {case.logits.dtype}"
        lines.append(f"{shape}: {int(found[i])} for {int(expected[i])}, {values}")
    return lines
