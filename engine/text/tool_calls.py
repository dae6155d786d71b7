"""Reads tool calls from answers, in the forms in which models write them.

Each row of FORMS is a form: its name, its signs, its parser and its writer. A model uses a form if its template or
tokens have one of the signs. A parser cuts an answer into pieces, and some of these look like calls. A writer gives the
text around a call's arguments, so that a call can be forced.
"""

import ast
import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text import harmony
from engine.text.control_tokens import BREAK
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Piece:
    """A part of an answer: text, or something that looks like a call.

    name: the function that it calls; None for text, "" for a call that cannot be read. arguments: an object, or its
    JSON; None without any. are_texts: the form writes all values as text, whatever types the tool takes. is_clear: it
    can be nothing but a call, so the answer says why if it is no valid one. is_closed: more arguments cannot follow.
    """

    text: str
    name: str | None = None
    arguments: Any = None
    are_texts: bool = False
    is_clear: bool = True
    is_closed: bool = True


Parser = Callable[[str], list[Piece]]

#: Returns the texts before and behind the JSON of a call's arguments. It takes a function's name, and what says
#: whether a text stands in the model's template or is one of its tokens.
Writer = Callable[[str, Callable[[str], bool]], tuple[str, str]]


@dataclass(frozen=True)
class ToolForm:
    """A form in which models write calls.

    signs: a model has this form if one of these texts is in its template or among its added tokens.
    marks: texts of tokens that stand around and between the parts of a call.
    write: None if the form's arguments are no JSON, so that no call can be forced.
    """

    name: str
    signs: tuple[str, ...]
    parse: Parser
    marks: tuple[str, ...] = ()
    write: Writer | None = None


@dataclass(frozen=True)
class ToolCalls:
    """The calls of an answer, as {'name', 'arguments': their JSON}, and its other text.

    problem: why something that looks like a call is no call.
    """

    calls: list[dict[str, str]]
    content: str
    problem: str | None = None


def find_form(template: str | None, added_tokens: Iterable[str]) -> ToolForm | None:
    """Return the form in which a model writes calls, by its template or tokens; None if neither shows one."""
    for place in (template or "", frozenset(added_tokens)):
        for form in FORMS:
            if any(sign in place for sign in form.signs):
                return form
    return None


def read_tool_calls(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    form: ToolForm | None = None,
    *,
    is_cut: bool = False,
) -> ToolCalls:
    """Return which of these tools an answer calls.

    tools: as in OpenAI's requests. form: the model's own form, which is tried first. The other forms follow, as models
    do not always keep to their own. What looks like a call but calls none of these tools stays in the content, and the
    problem says so. is_cut: the answer reached its length, so a call at its end may lack arguments.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    first_problem = None
    forms = list(FORMS)
    if form is not None:
        forms.sort(key=lambda other: other is not form)
    for tried in forms:
        pieces = tried.parse(text)
        calls = list[dict[str, str]]()
        outside = list[str]()
        problem = None
        for piece in pieces:
            call_or_problem = None if piece.name is None else _call_of(piece, functions, is_cut)
            if isinstance(call_or_problem, dict):
                calls.append(call_or_problem)
                continue
            outside.append(piece.text)
            if problem is None and piece.is_clear:
                problem = call_or_problem
        if calls:
            return ToolCalls(calls, "".join(outside).strip(), problem)
        first_problem = first_problem or problem
    return ToolCalls([], text, first_problem)


def _call_of(
    piece: Piece, functions: Mapping[str, Mapping[str, Any]], is_cut: bool
) -> dict[str, str] | str:
    """Return a piece's call, or why it is no call."""
    if not piece.name:
        return "what looks like a call of a tool cannot be read"
    if piece.name not in functions:
        return f"a call of {piece.name[:64]!r} is no call: no such tool was given"
    if is_cut and not piece.is_closed and (piece.are_texts or not piece.arguments):
        return f"the answer was cut in a call of {piece.name[:64]!r}"
    arguments = {} if piece.arguments is None else piece.arguments
    if isinstance(arguments, str):
        arguments = _whole_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        return f"the arguments of a call of {piece.name[:64]!r} are no object"
    if piece.are_texts:
        arguments = _typed(arguments, functions[piece.name].get("parameters"))
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # NaN, or a number too large for JSON's readers
        return f"the arguments of a call of {piece.name[:64]!r} have no JSON"
    # A model may write half of a surrogate pair as an escape. It stays an escape, as no file takes it otherwise.
    return {
        "name": piece.name,
        "arguments": written if _is_unicode(written) else json.dumps(arguments),
    }


def _typed(arguments: Mapping[str, str], parameters: Any) -> dict[str, Any]:
    """Return arguments with the types of the tool's parameters. The model wrote them as bare text."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    typed: dict[str, Any] = {}
    for name, text in arguments.items():
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string":
            typed[name] = text
            continue
        value = _value_of(text)
        has_no_value = value is None and text.strip() != "null"
        typed[name] = text if has_no_value else value
    return typed


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text.strip())


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _value_at(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON object or list that begins at this place of a text, and where it ends; None if there is none."""
    while at < len(text) and text[at].isspace():
        at += 1
    if not text.startswith(("{", "["), at):
        # A decoder's error would count the lines of the whole text.
        return None
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _whole_json(text: str) -> Any:
    decoded = _value_at(text, 0)
    return None if decoded is None or text[decoded[1] :].strip() else decoded[0]


def _json_piece(text: str, value: Any, *, is_marked: bool = True) -> Piece:
    """Return the piece of a JSON object with a function's name and arguments.

    The object may hold both in "function", or the name alone. is_marked: a token before the object says that it is a
    call.
    """
    if isinstance(value, Mapping):
        function = value.get("function")
        value = function if isinstance(function, Mapping) else value
        name = value.get("name", function if isinstance(function, str) else None)
        if isinstance(name, str):
            arguments = value.get("arguments", value.get("parameters"))
            is_call = is_marked or arguments is not None or value.keys() <= {"type", "id", "name"}
            return Piece(
                text,
                name if is_call else "",
                arguments,
                is_clear=is_marked or arguments is not None,
            )
    return Piece(text, "")


def _spans(
    text: str, pattern: re.Pattern[str], read: Callable[[re.Match[str]], list[Piece]]
) -> list[Piece]:
    """Cut a text at the matches of a pattern, and read each match."""
    pieces = list[Piece]()
    at = 0
    for match in pattern.finditer(text):
        pieces += [Piece(text[at : match.start()]), *read(match)]
        at = match.end()
    return [*pieces, Piece(text[at:])]


def _write_object(name: str, key: str = "arguments") -> tuple[str, str]:
    """Return what stands around the arguments in an object that names a function."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ', "}"


HERMES = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
_HERMES_END = re.compile(r"\s*(</tool_call>|(?=<tool_call>)|\Z)")


def _hermes(text: str) -> list[Piece]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>. An end tag may be missing."""
    pieces = list[Piece]()
    at = 0
    while (place := text.find(HERMES, at)) >= 0:
        pieces.append(Piece(text[at:place]))
        value, end = _value_at(text, place + len(HERMES)) or (None, place + len(HERMES))
        closed = _HERMES_END.match(text, end)
        at = closed.end() if closed else end
        pieces.append(_json_piece(text[place:at], value if closed else None))
    return [*pieces, Piece(text[at:])]


def _write_hermes(name: str, _: Callable[[str], bool]) -> tuple[str, str]:
    before, behind = _write_object(name)
    return f"{HERMES}\n{before}", f"{behind}\n{HERMES_CLOSE}"


_XML_OPEN = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>\s*")
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
#: A value ends at the tag behind which the call goes on or ends, so it may hold such tags itself.
_XML_VALUE_END = re.compile(
    r"\n?(?:</parameter>\s*(?=<parameter=|</function>|</tool_call>|\Z)|(?=<parameter=))"
)
_XML_CLOSE = re.compile(r"</function>(?:\s*</tool_call>)?|</tool_call>|\Z")


def _qwen_xml(text: str) -> list[Piece]:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>, in <tool_call>, perhaps without the last tags."""
    return _tagged(text, _XML_OPEN, _XML_PARAMETER, _XML_VALUE_END, _XML_CLOSE)


_GLM_OPEN = re.compile(r"<tool_call>\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>|\Z)")
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>\s*(?=<arg_key>|</tool_call>|\Z)")
_GLM_CLOSE = re.compile(r"</tool_call>|\Z")


def _glm(text: str) -> list[Piece]:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, perhaps without the last tag."""
    return _tagged(text, _GLM_OPEN, _GLM_KEY, _GLM_VALUE_END, _GLM_CLOSE)


def _tagged(
    text: str,
    opening: re.Pattern[str],
    key: re.Pattern[str],
    value_end: re.Pattern[str],
    closing: re.Pattern[str],
) -> list[Piece]:
    """Read calls whose arguments have tags. A call with other text between its tags was cut, and cannot be read."""
    ends = [(end.start(), end.end()) for end in value_end.finditer(text)]
    pieces = list[Piece]()
    at = 0
    while call := opening.search(text, at):
        pieces.append(Piece(text[at : call.start()]))
        arguments = dict[str, str]()
        at = call.end()
        while pair := key.match(text, at):
            next_end = bisect_left(ends, (pair.end(), 0))
            if next_end == len(ends):
                break
            start, end = ends[next_end]
            value = text[pair.end() : start]
            if opening.search(value) and "</" not in text[start:end]:
                # Another call begins before this value ends.
                break
            arguments[pair[1].strip()] = value
            at = end
        closed = closing.match(text, at)
        at = closed.end() if closed else at
        name = call[1].strip() if closed else ""
        is_closed = closed is not None and bool(closed[0])
        pieces.append(
            Piece(text[call.start() : at], name, arguments, are_texts=True, is_closed=is_closed)
        )
    return [*pieces, Piece(text[at:])]


MISTRAL = "[TOOL_CALLS]"
MISTRAL_ARGUMENTS = "[ARGS]"
MISTRAL_ID = "[CALL_ID]"
_MISTRAL_NAME = re.compile(
    r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{|\[TOOL_CALLS\]|\Z)"
)


def _mistral(text: str) -> list[Piece]:
    """[TOOL_CALLS] before a list of objects, or before each NAME[ARGS]{...}."""
    pieces = list[Piece]()
    at = 0
    while (place := text.find(MISTRAL, at)) >= 0:
        pieces.append(Piece(text[at:place]))
        at = place + len(MISTRAL)
        name_match = _MISTRAL_NAME.match(text, at)
        value_at = name_match.end() if name_match else at
        value, end = _value_at(text, value_at) or (None, value_at)
        whole = text[place:end]
        if name_match:
            # A name without arguments is a call too; only arguments that begin must be readable.
            is_read = value is not None or not text.startswith("{", value_at)
            pieces.append(
                Piece(whole, name_match[1] if is_read else "", value, is_closed=end < len(text))
            )
        elif value is not None:
            items = value if isinstance(value, list) else [value]
            pieces += [_json_piece(whole, item) for item in items]
        else:
            pieces.append(Piece(whole, ""))
        at = end
    return [*pieces, Piece(text[at:])]


def _write_mistral(name: str, shows: Callable[[str], bool]) -> tuple[str, str]:
    if shows(MISTRAL_ARGUMENTS):
        return f"{MISTRAL}{name}{MISTRAL_ARGUMENTS}", ""
    before, behind = _write_object(name)
    return f"{MISTRAL}[{before}", f"{behind}]"


DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
_DEEPSEEK = re.compile(
    f"(?:{DEEPSEEK[0]}\\s*)?{DEEPSEEK[1]}(.*?){DEEPSEEK[2]}(.*?)(?P<end>{DEEPSEEK[3]}|\\Z)(?:\\s*{DEEPSEEK[4]})?",
    re.DOTALL,
)
_FENCED = re.compile(r"\s*([^\n`{]+?)\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)


def _deepseek(text: str) -> list[Piece]:
    """function<sep>NAME and a fenced block of JSON, as V3 writes it, or NAME<sep>{...}, as V3.1 does."""

    def read(match: re.Match[str]) -> list[Piece]:
        fenced = _FENCED.match(match[2])
        is_closed = match["end"] != ""
        if match[1].strip() == "function" and fenced:
            return [Piece(match[0], fenced[1], fenced[2], is_closed=is_closed)]
        return [Piece(match[0], match[1].strip(), match[2], is_closed=is_closed)]

    return _spans(text, _DEEPSEEK, read)


def _write_deepseek(name: str, shows: Callable[[str], bool]) -> tuple[str, str]:
    calls_begin, call_begin, separator, call_end, calls_end = DEEPSEEK
    if shows("```json"):
        return (
            f"{calls_begin}{call_begin}function{separator}{name}\n```json\n",
            f"\n```{call_end}{calls_end}",
        )
    return f"{calls_begin}{call_begin}{name}{separator}", f"{call_end}{calls_end}"


FUNCTOOLS = "functools["
LISTED = "<|tool_call|>"
LISTED_CLOSE = "<|/tool_call|>"
_LISTED = re.compile(r"(?:functools|<\|tool_call\|>|<tool_call>)\s*(?=\[)")
_LISTED_END = re.compile(r"\s*(?:<\|/tool_call\|>|</tool_call>)")


def _listed(text: str) -> list[Piece]:
    """functools[{...}] of Phi-4, <|tool_call|>[{...}] of Phi-4-mini and Granite."""
    pieces = list[Piece]()
    at = 0
    while opened := _LISTED.search(text, at):
        pieces.append(Piece(text[at : opened.start()]))
        value, at = _value_at(text, opened.end()) or (None, len(text))
        closed = _LISTED_END.match(text, at)
        if closed:
            at = closed.end()
        whole = text[opened.start() : at]
        if isinstance(value, list):
            pieces += [_json_piece(whole, item) for item in value]
        else:
            pieces.append(Piece(whole, ""))
    return [*pieces, Piece(text[at:])]


def _write_listed(name: str, shows: Callable[[str], bool]) -> tuple[str, str]:
    before, behind = _write_object(name)
    if shows(FUNCTOOLS):
        return f"{FUNCTOOLS}{before}", f"{behind}]"
    return f"{LISTED}[{before}", f"{behind}]{LISTED_CLOSE if shows(LISTED_CLOSE) else ''}"


PYTHON_TAG = "<|python_tag|>"


def _llama_json(text: str) -> list[Piece]:
    """Read an answer that is one object or several, and nothing else. A tag may come first, and text before the tag."""
    before, tag, behind = text.rpartition(PYTHON_TAG)
    pieces = list[Piece]()
    at = 0
    while at < len(behind.rstrip()):
        start = at
        value, at = _value_at(behind, at) or (None, len(behind))
        listed = value if isinstance(value, list) and value else [value]
        pieces += [_json_piece(behind[start:at], item, is_marked=bool(tag)) for item in listed]
        while at < len(behind) and (behind[at].isspace() or behind[at] == ";"):
            at += 1
    if all(piece.name for piece in pieces):
        return [Piece(before), *pieces]
    return [Piece(before), Piece(tag + behind, "")] if tag else [Piece(text)]


def _write_llama_json(name: str, _: Callable[[str], bool]) -> tuple[str, str]:
    return _write_object(name, "parameters")


def _llama_pythonic(text: str) -> list[Piece]:
    """[NAME(KEY=VALUE), ...] with Python's literals, and nothing else."""
    bare = (
        text.strip()
        .removeprefix(PYTHON_TAG)
        .removeprefix("<|python_start|>")
        .removesuffix("<|python_end|>")
        .strip()
    )
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", bare):
        return [Piece(text)]
    try:
        (statement,) = ast.parse(bare).body
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.List)
        return list(_pythonic_calls(bare, statement.value))
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return [Piece(text, "")]


def _pythonic_calls(text: str, calls: ast.List) -> Iterator[Piece]:
    for call in calls.elts:
        assert isinstance(call, ast.Call)
        assert not call.args
        assert all(keyword.arg for keyword in call.keywords)
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        yield Piece(text, ast.unparse(call.func), arguments)


_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>[^<]*?)?\s?\bto=([^\s<]+)[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*"
    r"<\|message\|>(.*?)(?:<\|call\|>|(?=<\|start\|>)|(?P<cut>\Z))",
    re.DOTALL,
)


def _harmony(text: str) -> list[Piece]:
    """A message of gpt-oss to functions.NAME."""

    def read(match: re.Match[str]) -> list[Piece]:
        is_closed = match["cut"] is None
        return [Piece(match[0], match[1].removeprefix("functions."), match[2], is_closed=is_closed)]

    return _spans(text, _HARMONY, read)


def _write_harmony(name: str, _: Callable[[str], bool]) -> tuple[str, str]:
    header = (
        f"{harmony.CHANNEL}commentary to=functions.{name} {harmony.CONSTRAIN}json{harmony.MESSAGE}"
    )
    return header, harmony.CALL


#: The order counts: a template in an earlier form may hold a later form's sign too.
FORMS: tuple[ToolForm, ...] = (
    ToolForm("harmony", (harmony.CONSTRAIN,), _harmony, harmony.MARKS, _write_harmony),
    ToolForm("deepseek", DEEPSEEK[:2], _deepseek, DEEPSEEK, _write_deepseek),
    ToolForm(
        "mistral", (MISTRAL,), _mistral, (MISTRAL, MISTRAL_ARGUMENTS, MISTRAL_ID), _write_mistral
    ),
    ToolForm("qwen xml", ("<function=",), _qwen_xml),
    ToolForm("glm", ("<arg_key>",), _glm),
    ToolForm("listed", (FUNCTOOLS, LISTED), _listed, (LISTED, LISTED_CLOSE), _write_listed),
    ToolForm("hermes", (HERMES,), _hermes, (HERMES, HERMES_CLOSE), _write_hermes),
    ToolForm(
        "llama pythonic",
        ("[func_name1(",),
        _llama_pythonic,
        (PYTHON_TAG, "<|python_start|>", "<|python_end|>"),
    ),
    ToolForm(
        "llama json", (PYTHON_TAG, '"parameters":'), _llama_json, (PYTHON_TAG,), _write_llama_json
    ),
)


class ToolCallReader:
    """Reads the calls in completions of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._form = find_form(tokenizer.tool_template, tokenizer.added_tokens)
        added = tokenizer.added_tokens.items()
        marks = () if self._form is None else self._form.marks
        #: The texts, by token id, of the marks that are special tokens: a completion's text leaves these out.
        self.hidden_marks = {
            token.token_id: text for text, token in added if token.is_special and text in marks
        }
        self._is_logged = False

    def read(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_cut: bool = False,
        logs: bool = True,
    ) -> ToolCalls:
        """Return which of the tools a text calls.

        is_cut: as in `read_tool_calls`. logs: whether to log that an answer holds something that only looks like a
        call; this is logged once.
        """
        calls = read_tool_calls(text, tools, self._form, is_cut=is_cut)
        for call in calls.calls:
            call["arguments"] = call["arguments"].replace(BREAK, "")
        if logs and calls.problem is not None and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "an answer keeps in its text what looks like a call of a tool: tool_call_error says why"
            )
        return calls
