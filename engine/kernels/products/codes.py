"""Codes of weights that stay packed, by kind: their bits, and the numbers that they stand for."""

#: Bits of a code.
BITS = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8}
#: The kinds whose codes are integers, and have a zero point for each scale.
INTEGERS = ("int4", "int8")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The numbers of the kinds that have a table of them, in the order of their codes.
NUMBERS = {"fp4": (*E2M1, *(-number for number in E2M1))}
