"""Reads structs of Thrift's compact protocol, in which a Parquet file describes its pages."""

from __future__ import annotations

from typing import Any

#: Structs within structs; a page's header has three, a footer eight.
MAX_DEPTH = 16

#: Types of fields and of a list's items. A field of a truth value is its type, and has no more bytes.
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
TRUTHS, INTEGERS, LISTS = (TRUE, FALSE), (I16, I32, I64), (LIST, SET)


def read_struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return a struct's integers, truth values and structs by field id, and the place behind it.

    Whatever else it holds is passed over. Raises IndexError where the data ends within the struct, ValueError
    for what is none. Source: Thrift's compact protocol specification.
    """
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if head == 0:
            return fields, at
        kind, step = head & 15, head >> 4
        if step:
            number += step
        else:
            number, at = integer(data, at)
        if kind in INTEGERS:
            fields[number], at = integer(data, at)
        elif kind == STRUCT:
            fields[number], at = read_struct(data, at, depth + 1)
        elif kind in TRUTHS:
            fields[number] = kind == TRUE
        else:
            at = _behind(data, at, kind, depth)


def varint(data: bytes, at: int, bits: int = 64) -> tuple[int, int]:
    """Return the number at a place, and the place behind it. Raises IndexError or ValueError."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift >= bits:
            raise ValueError(f"it has an integer of more than {bits} bits")


def integer(data: bytes, at: int) -> tuple[int, int]:
    """As `varint`, for one that may be negative."""
    value, at = varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _behind(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the place behind a value that is not kept."""
    if kind == BINARY:
        size, at = varint(data, at)
        return _within(data, at + size)
    if kind == DOUBLE:
        return _within(data, at + 8)
    if kind == BYTE:
        return at + 1
    if kind not in LISTS:
        raise ValueError(f"it has a field of type {kind}")
    size, each = data[at] >> 4, data[at] & 15
    at += 1
    if size == 15:
        size, at = varint(data, at)
    for _ in range(size):
        if each in TRUTHS:
            at += 1
        elif each in INTEGERS:
            at = varint(data, at)[1]
        elif each == STRUCT:
            at = read_struct(data, at, depth + 1)[1]
        else:
            at = _behind(data, at, each, depth + 1)
    return _within(data, at)


def _within(data: bytes, at: int) -> int:
    if at > len(data):
        raise IndexError(at)
    return at
