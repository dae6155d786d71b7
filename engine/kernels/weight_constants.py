"""The numbers by which all samplers (torch, Triton, Numba) weigh tokens: see engine/sampling/draws.py."""

#: Weight of the likeliest token. Sums over a vocabulary are exact in int64, in any order.
WHOLE_BITS = 40
WHOLE = 2**WHOLE_BITS
#: The largest vocabulary: 2^20 weights of 2^40, times a fraction, add up to less than 2^63.
MAX_VOCAB_SIZE = 2**20
#: Exponents are fixed point, in steps of 2^-23, where a float's own exponent begins.
FRACTION_BITS = 23
LOG2_E_STEPS = 12102203.0  # 2^23 log2(e), rounded to float32
#: A number of float32; lower ones count as it, or the steps overflow.
LEAST_TEMPERATURE = 4.000000094968912e-32
LOWEST_EXPONENT = -float(
    (WHOLE_BITS + 1) << FRACTION_BITS
)  # there a weight is 1/2, and so is cut to 0
#: The mantissa's bits that are looked at, the exponent's bits, and those of 1.0, as float32 has them.
MANTISSA = 0x007FFFF8
EXPONENT = -(1 << FRACTION_BITS)
ONE = 0x3F800000
#: 2^40 2^(g - 1) for g from 1 to 2, highest power first. Fitted to the least relative error (2e-7 with the
#: rounding of float32's products and sums, each by itself), exact at 1, and rising over all 2^20 mantissas.
COEFFICIENTS = (
    2066332672.0,
    -445959744.0,
    42493796352.0,
    118588956672.0,
    388921262080.0,
    547887218688.0,
)
