"""Patterns as people write them, in the dialect of llguidance.

`\\w`, `\\d` and `\\s` mean other characters in Python, ECMAScript and Rust, and by Unicode's version. What is
generated shall match whichever of them reads it. So a class stands for the characters that it has in all
of them, and a negated one for those that it has in none.
"""

from __future__ import annotations

#: Of each class the characters that all dialects have in it, and a superset of what any has.
_LEAST = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0C\x0B"}
_MOST = {"d": r"\p{N}\p{Cn}", "w": r"\p{L}\p{M}\p{N}\p{Pc}\p{S}\p{Cf}\p{Cn}", "s": r"\p{Z}\p{Cc}\p{Cf}\p{Cn}"}


def portable(pattern: str) -> str:
    """The pattern for a whole text, with classes that every dialect reads alike.

    Anchors at the ends say what is meant anyway. What is no valid pattern stays none.
    """
    parts: list[str] = []
    negated: list[bool] = []  # of the bracketed classes that are open, whether their sense is turned
    place = 0
    while place < len(pattern):
        char = pattern[place]
        width = 1
        if char == "\\":
            part, width = _escape(pattern[place : place + 2], negated)
        elif char == "[":
            is_negated = pattern[place + 1 : place + 2] == "^"
            outer = negated[-1] if negated else False
            negated.append(outer != is_negated)
            # a bracket that comes first is a character of the class
            width = 2 if is_negated else 1
            part = pattern[place : place + width]
            if pattern[place + width : place + width + 1] == "]":
                part, width = part + r"\]", width + 1
        elif char == "]" and negated:
            negated.pop()
            part = char
        else:
            part = char
        parts.append(part)
        place += width
    return "".join(parts)


def _escape(escape: str, negated: list[bool]) -> tuple[str, int]:
    name = escape[1:]
    if name.lower() not in _LEAST:
        return ({"\\Z": r"\z", "\\/": "/"}.get(escape, escape), len(escape))
    turned = negated[-1] if negated else False
    is_complement = name.isupper()
    characters = (_MOST if is_complement != turned else _LEAST)[name.lower()]
    if negated and not is_complement:
        return characters, 2
    return (f"[^{characters}]" if is_complement else f"[{characters}]"), 2
