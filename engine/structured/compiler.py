"""Compiler: turns a request's structured outputs into a grammar, by llguidance.

Forms that cannot be enforced exactly are refused. Source: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import InvalidSampling
from engine.sampling.parameter_values import brief
from engine.sampling.structured_params import NAME, StructuredOutputsParams
from engine.structured.endless_schemas import NotEnforceable
from engine.structured.json_schemas import OPTIONS, enforceable, strings_of
from engine.structured.matcher import MAX_MASK_S, SMALL_VOCABULARY, Matcher, Vocabulary, fill_masks

if TYPE_CHECKING:
    from llguidance import LLMatcher


#: For each class, the characters that every dialect has in it, and a superset of those that any dialect has.
_LEAST = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0C\x0B"}
_MOST = {
    "d": r"\p{N}\p{Cn}",
    "w": r"\p{L}\p{M}\p{N}\p{Pc}\p{S}\p{Cf}\p{Cn}",
    "s": r"\p{Z}\p{Cc}\p{Cf}\p{Cn}",
}


#: An escape, a class of all characters (`[\s\S]`), an opening bracket with its modifiers, or a single character.
_PARTS = re.compile(r"\\.|\[\\(?:s\\S|S\\s|d\\D|D\\d|w\\W|W\\w)\]|\[\^?\]?|.", re.DOTALL)

_ALL_CHARACTERS = r"[\x00-\x{10FFFF}]"


def portable(pattern: str) -> str:
    """Write the pattern with classes that every dialect reads alike; an invalid pattern stays invalid."""
    parts: list[str] = []
    negated: list[bool] = []  # whether each open bracketed class is negated
    for part in _PARTS.findall(pattern):
        if part[0] == "\\":
            part = _escape(part, negated)
        elif part.startswith("[\\"):
            part = _ALL_CHARACTERS
        elif part[0] == "[":
            # A class within a class: two negations undo each other.
            is_in_negated = bool(negated) and negated[-1]
            negated.append(is_in_negated != ("^" in part))
            part = part.replace("]", r"\]")  # a bracket that comes first is a character
        elif part == "]" and negated:
            negated.pop()
        parts.append(part)
    return "".join(parts)


def _escape(escape: str, negated: list[bool]) -> str:
    """Write an escape as every dialect reads it. negated: for each open bracketed class, whether it is negated.

    Characters on which dialects differ never match. So the class is written with the least characters that it may mean;
    but if they are negated once, by the escape or by the bracket, with the most.
    """
    name = escape[1:]
    if name.lower() not in _LEAST:
        return {"\\Z": r"\z", "\\/": "/"}.get(escape, escape)
    is_complement = name.isupper()
    is_in_negated = bool(negated) and negated[-1]
    characters = (_MOST if is_complement != is_in_negated else _LEAST)[name.lower()]
    if is_complement:
        return f"[^{characters}]"
    return characters if negated else f"[{characters}]"


MAX_REASON_CHARS = 300

#: Between two parts of a JSON text: nothing.
COMPACT = {"whitespace_flexible": False}
#: Between two parts of a JSON text: nothing, one blank, or a line break and what it is indented by.
SPACED = {"whitespace_pattern": r" |\n {0,32}"}

#: Limits of a grammar: about a second and 40 MB; the defaults allow 3 s and 500 MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
}

#: Bytes of the stack on which a form is tried. The engine then compiles it on a larger one.
STACK_BYTES = 16 << 20

#: Parts of a Lark grammar that may hold anything: a text, a pattern, a comment; then a control token, and the word
#: before a schema.
_LARK_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|(?P<token><[^<>\s]+>)|(?P<schema>%json\s*)'
)

#: llguidance's advice on its own options, at the end of an error.
_ADVICE = re.compile(r"[.;]? (?:Enable '\w+' option|either increase limits\.).*")

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_STACK_SIZE = threading.Lock()  # the size is one setting for all threads that are started


class Compiler:
    """Compiles grammars for one vocabulary."""

    def __init__(
        self,
        tokenizer: str,
        num_tokens: int,
        eos_token_ids: list[int],
        control_tokens: Mapping[str, int],
    ) -> None:
        """Read a vocabulary, which takes up to four seconds. Raises InvalidSampling for one that cannot be served.

        tokenizer: as `tokenizer_of_bytes` writes it. eos_token_ids: the ids that end a text. control_tokens: ids of the
        tokens that grammars may name, such as `<tool_call>`.
        """
        from llguidance import LLTokenizer

        self._control_tokens = control_tokens
        try:
            self._tokenizer = LLTokenizer(
                tokenizer,
                n_vocab=num_tokens,
                eos_token=eos_token_ids or None,
                # Slices: sets of tokens that are often allowed together. For few tokens they cost more than they save.
                slices=[] if num_tokens < SMALL_VOCABULARY else None,
            )
        except Exception as error:  # whatever it makes of a vocabulary
            raise InvalidSampling(
                f"{NAME} cannot be served with this model's tokenizer", _short(error)
            ) from error
        self.vocabulary = Vocabulary.of(self._tokenizer)

    def grammar_of(self, spec: StructuredOutputsParams) -> str:
        """Return the grammar in llguidance's form. Raises InvalidSampling."""
        try:
            grammar = _read(spec, self._control_tokens)
            self._check_writable(spec)
        except InvalidSampling:
            raise
        except Exception as error:  # llguidance's readers may raise anything
            raise _refused(spec, error) from error
        return grammar

    def _check_writable(self, spec: StructuredOutputsParams) -> None:
        """Raise InvalidSampling if the form names a text that the vocabulary cannot write."""
        texts = literals_of(spec)
        if self._writes("\n".join(texts)):
            return
        for text in texts:
            if not self._writes(text):
                raise unusable(
                    spec, f"without {brief(text)}, which the model's vocabulary cannot write"
                )

    def _writes(self, text: str) -> bool:
        return bool(
            self._tokenizer.decode_bytes(self._tokenizer.tokenize_str(text)) == text.encode()
        )

    def compile(self, spec: StructuredOutputsParams, grammar: str) -> LLMatcher:
        """Compile a grammar that `grammar_of` has written. Raises InvalidSampling."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise _refused(spec, compiled.get_error())
        return compiled

    def try_out(self, spec: StructuredOutputsParams, compiled: LLMatcher) -> None:
        """Raise InvalidSampling if no text satisfies the form, or if its first token takes too long to find."""
        first = Matcher(compiled.deep_copy(), compiled, self.vocabulary, frozenset(), None)
        mask = np.zeros((1, self.vocabulary.num_words), np.int32)
        start = time.monotonic()
        fill_masks([first], mask)
        if first.error is not None:
            raise _refused(spec, first.error)
        if not mask.any() and not first.may_end:
            raise _refused(spec, "no text satisfies it")
        if time.monotonic() - start > MAX_MASK_S:
            raise _refused(spec, "its first token takes too long to find")


def unusable(spec: StructuredOutputsParams, reason: str) -> InvalidSampling:
    """Make the error of a form that cannot be enforced."""
    return InvalidSampling(f"{NAME}.{spec.kind} must be one that can be enforced", f"one {reason}")


@contextmanager
def stacks_of(num_bytes: int) -> Iterator[None]:
    """Give threads that are started within the block stacks of num_bytes bytes."""
    with _STACK_SIZE:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


def literals_of(spec: StructuredOutputsParams) -> list[str]:
    """List the texts in a form: choices, a schema's keys and values, or the letters of a pattern or grammar."""
    if spec.choice is not None:
        return list(spec.choice)
    if spec.json is not None:
        return [
            json.dumps(text, ensure_ascii=False) for text in strings_of(json.loads(str(spec.json)))
        ]
    source = spec.regex or spec.grammar or ""
    return sorted({char for char in source if not char.isascii()})


def _with_ids(grammar: str, control_tokens: Mapping[str, int]) -> str:
    """Replace control tokens such as `<tool_call>` in a Lark grammar by ids. Raises InvalidSampling if unknown."""

    def part(match: re.Match[str]) -> str:
        name = match["token"]
        if name is None or name.startswith("<["):  # no token, or a token named by its id
            return match[0]
        if name not in control_tokens:
            raise InvalidSampling(
                f"{NAME}.grammar must name control tokens that the model has", name
            )
        return f"<[{control_tokens[name]}]>"

    return _LARK_PARTS.sub(part, grammar)


def _json_options(spec: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options of JSON."""
    return SPACED if spec.allow_whitespace else COMPACT


def _with_schemas(grammar: str, options: Mapping[str, Any]) -> str:
    """Make the schemas in a Lark grammar ones that llguidance enforces. Raises NotEnforceable.

    options: llguidance's options of JSON.
    """
    parts = []
    at = 0
    for match in _LARK_PARTS.finditer(grammar):
        if match["schema"] is None or match.start() < at:
            continue
        schema, end = json.JSONDecoder().raw_decode(grammar, match.end())
        written = {**enforceable(schema), OPTIONS: options} if isinstance(schema, dict) else schema
        parts += [grammar[at : match.end()], json.dumps(written, ensure_ascii=False)]
        at = end
    return "".join([*parts, grammar[at:]])


def _read(spec: StructuredOutputsParams, control_tokens: Mapping[str, int]) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if spec.json is not None or spec.json_object:
        schema = json.loads(str(spec.json)) if spec.json is not None else {"type": "object"}
        if schema is False:
            raise _refused(spec, "no text satisfies it")
        try:
            schema = enforceable({} if schema is True else schema)
        except NotEnforceable as error:
            raise unusable(spec, str(error)) from None
        text = json.dumps(schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=_json_options(spec))  # type: ignore[arg-type]
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(portable(spec.regex))
    if spec.choice is not None:
        # as one pattern, whose states are made as they are needed, thousands of texts are no problem
        return LLMatcher.grammar_from_regex(
            "|".join(_META.sub(r"\\\g<0>", text) for text in spec.choice)
        )
    assert spec.grammar is not None
    try:
        grammar = _with_schemas(any_to_lark(spec.grammar), _json_options(spec))
    except NotEnforceable as error:
        raise unusable(spec, f"with a schema {error}") from None
    return LLMatcher.grammar_from_lark(_with_ids(grammar, control_tokens))


def _refused(spec: StructuredOutputsParams, reason: object) -> InvalidSampling:
    return unusable(spec, f"of which llguidance says: {_short(reason)}")


def _short(reason: object) -> str:
    """Return a reason on one line, without advice on llguidance's options: nobody can set them here."""
    line = " ".join(str(reason).replace("<non-verbose/>", "").split())
    return _ADVICE.sub("", line)[:MAX_REASON_CHARS]
