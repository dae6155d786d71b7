"""Reads structs of Thrift's compact protocol, in which a Parquet file describes its pages."""

from __future__ import annotations

from typing import Any

#: Structs within structs; a page's header has three.
MAX_DEPTH = 16

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


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
            number, at = _integer(data, at)
        if kind in _INTEGERS:
            fields[number], at = _integer(data, at)
        elif kind == _STRUCT:
            fields[number], at = read_struct(data, at, depth + 1)
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            at = _behind(data, at, kind, depth)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("it has an integer of more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _behind(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the place behind a value that is not kept."""
    if kind == _BINARY:
        size, at = _varint(data, at)
        return _within(data, at + size)
    if kind == _DOUBLE:
        return _within(data, at + 8)
    if kind == _BYTE:
        return at + 1
    if kind not in (_LIST, _SET):
        raise ValueError(f"it has a field of type {kind}")
    size, each = data[at] >> 4, data[at] & 15
    at += 1
    if size == 15:
        size, at = _varint(data, at)
    for _ in range(size):
        if each in (_TRUE, _FALSE):
            at += 1
        elif each in _INTEGERS:
            at = _varint(data, at)[1]
        elif each == _STRUCT:
            at = read_struct(data, at, depth + 1)[1]
        else:
            at = _behind(data, at, each, depth + 1)
    return _within(data, at)


def _within(data: bytes, at: int) -> int:
    if at > len(data):
        raise IndexError(at)
    return at
