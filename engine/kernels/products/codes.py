"""Codes of weights that stay packed, by kind: their bits, and the numbers that they stand for."""

#: Bits of a code.
BITS = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8, "nf4": 4, "bnb_fp4": 4}
#: The kinds whose codes are integers, and have a zero point for each scale.
INTEGERS = ("int4", "int8")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: bitsandbytes has twelfths of these numbers, of which bfloat16 would round some; its scales are twelve times ours.
TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
#: Quantiles of the normal distribution, as bitsandbytes has them. Source: QLoRA, arXiv:2305.14314, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
#: The numbers of the kinds that have a table of them, in the order of their codes. Kernels round them to the dtype in
#: which they multiply, as a weight that is unpacked is rounded; only some of nf4's change in that.
NUMBERS = {
    "fp4": (*E2M1, *(-number for number in E2M1)),
    "nf4": NF4,
    "bnb_fp4": (*TWELFTHS, *(-number for number in TWELFTHS)),
}
