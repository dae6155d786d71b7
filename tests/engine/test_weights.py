"""Integer weights of tokens: near the exact ones, in the order of the logits, and parts of their sums."""

from __future__ import annotations

import torch

from engine.kernels.token_weights import FRACTION_BITS, LEAST_TEMPERATURE, MANTISSA, WHOLE
from engine.sampling.weights import decay_rate, least_weight, share, target, weigh

STEPS = torch.tensor([float(2**FRACTION_BITS)])  # the rate at which a logit is a power of two
ZERO = torch.zeros(1)


def test_weights_rise_with_every_mantissa() -> None:
    """All that are looked at, of one octave and on to the next: only equal ones weigh the same."""
    step = MANTISSA & -MANTISSA
    steps = torch.arange(0, 2**FRACTION_BITS + 1, step, dtype=torch.float64) / 2**FRACTION_BITS - 1
    found = weigh(steps.float(), ZERO, STEPS)
    assert (found.diff() > 0).all()
    assert (found[0], found[-1]) == (WHOLE // 2, WHOLE)


def test_weights_are_near_the_exact_ones() -> None:
    """To 1e-6, and to one where that is more; from the likeliest down to nothing."""
    logits = -torch.linspace(0, 43, 1_000_003, dtype=torch.float32)
    exact = WHOLE * torch.exp2(logits.double())
    error = (weigh(logits, ZERO, STEPS) - exact).abs()
    assert (error <= 1e-6 * exact + 1).all()
    assert weigh(torch.tensor([-torch.inf, -41.5, -1e38]), ZERO, STEPS).tolist() == [0, 0, 0]


def test_temperatures_from_none_to_a_million() -> None:
    """What is next to nothing counts as the least that there is, and no product overflows into no number."""
    logits = torch.tensor([0.0, -1e-30, -1.0, -3e38, -torch.inf])
    for temperature in (1e-45, LEAST_TEMPERATURE, 1e-30, 1.0, 1e6):
        found = weigh(logits, ZERO, decay_rate(torch.tensor([temperature])))
        assert found[0] == WHOLE
        assert (found.diff() <= 0).all()
        assert found[-2:].tolist() == [0, 0]
    assert decay_rate(torch.tensor([1e-45])) == decay_rate(torch.tensor([LEAST_TEMPERATURE]))


def test_parts_of_a_sum_are_exact() -> None:
    """As Python's integers have them, up to the largest sum there is."""
    totals = [1, 7, WHOLE - 1, 2**59 + 12345, 2**60]
    for total in totals:
        for top_p in (1e-12, 0.01, 0.5, 0.95, 1 - 2**-24):
            fraction = int(torch.tensor(top_p).double() * 2**31)
            found = share(torch.tensor([total]), torch.tensor([top_p]))
            assert found.tolist() == [max(1, fraction * total >> 31)]
        for word in (0, 1, 2**31, 2**32 - 1):
            found = target(torch.tensor([total]), torch.tensor([word]))
            assert found.tolist() == [(2 * word + 1) * total >> 33]
            assert found.item() < total
    assert least_weight(torch.tensor([0.0, 0.25, 1.0])).tolist() == [0, WHOLE // 4, WHOLE]
