"""Jinja in its sandbox, with a limit on a rendering's work: a template is part of a job, and not trusted.

What a rendering does is counted in characters: those that it writes, copies, repeats or looks through, and a
few for each turn of a loop. Nothing that may grow goes uncounted: operators, calls and literals of lists are
intercepted, filters and methods are those of an exact list.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from decimal import Decimal
from typing import Any
from uuid import UUID

import jinja2
from jinja2 import meta, nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..common.json_text import to_json
from .arguments import MAX_PROMPT_BYTES

#: Characters of one rendering, and what a turn of a loop or a call of a macro counts: 100,000 turns.
MAX_WORK, TURN = 4 * MAX_PROMPT_BYTES, 40

#: What a value counts that is looked at in a list.
ITEM = 3

#: Bits of a number that is computed; it is written out in time that grows with their square.
MAX_BITS = 4096

#: Numbers that filters are given, such as a width.
MAX_WIDTH = 1000

FILTERS = """
    abs capitalize count d default dictsort first float groupby indent int items join last length list lower
    map max min reject rejectattr replace reverse round select selectattr sort string sum title tojson trim
    truncate unique upper wordcount
"""
#: Of these, what looks at a value's outside alone.
_QUICK = frozenset(
    {"abs", "count", "d", "default", "first", "float", "int", "items", "last", "length", "round"}
)

GLOBALS = ("dict", "namespace")
_OF_TEXT = """
    capitalize casefold count endswith find index isalnum isalpha isdigit islower isnumeric isspace istitle
    isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit
    rstrip split splitlines startswith strip swapcase title upper
"""
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(_OF_TEXT.split()),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    float: frozenset({"is_integer"}),
    datetime.date: frozenset({"isoformat", "isoweekday", "strftime", "weekday"}),
    datetime.time: frozenset({"isoformat", "strftime"}),
    datetime.timedelta: frozenset({"total_seconds"}),
}
#: What has a text.
_WRITTEN = (
    str,
    int,
    float,
    Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    jinja2.Undefined,
    UUID,
)

#: What reads other files.
_UNSERVED = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
_FORMAT_WIDTH = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)")


class TemplateProblem(Exception):
    """Raised when a row's values cannot be rendered; its text says why."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders one run's templates; of one thread at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined,
            finalize=jinja2.pass_context(lambda context, value: self._written(value)),
            optimized=False,  # what it would compute beforehand nobody counts
            keep_trailing_newline=True,
        )
        special = {
            "join": self._join,
            "replace": self._replace,
            "tojson": self._tojson,
            "string": self._written,
        }
        self.filters = {name: special.get(name) or self._limited(name) for name in FILTERS.split()}
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals["range"] = self._range
        self._own = (self.charge, self.tilde, self.searched, self.built, self._range)
        self._left = 0

    def template(self, text: str) -> tuple[jinja2.Template, frozenset[str]]:
        """Compile a text; return the template and the names that it takes from a row.

        Raises jinja2.TemplateSyntaxError, TemplateProblem for what is not served, and what Python's compiler
        raises for nesting that is too deep.
        """
        tree = self.parse(text)
        for node in tree.find_all(_UNSERVED):
            raise TemplateProblem(
                f"line {node.lineno}: {type(node).__name__.lower()} reads other templates, and there are none"
            )
        names = frozenset(meta.find_undeclared_variables(tree) - self.globals.keys())
        code = self.compile(self._counted(tree))
        return jinja2.Template.from_code(self, code, self.make_globals(None)), names

    def render(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Return what a template makes of a row. Raises TemplateProblem."""
        self._left = MAX_WORK
        try:
            return template.render(values)
        except TemplateProblem:
            raise
        except RecursionError:
            raise TemplateProblem("a macro or loop calls itself too deeply") from None
        except Exception as error:  # noqa: BLE001  # a template is a program: whatever it raises is the row's
            raise TemplateProblem(f"{type(error).__name__}: {str(error)[:200]}") from None

    def charge(self, cost: int) -> str:
        """Count work, before it is done. Raises TemplateProblem beyond MAX_WORK."""
        self._left -= cost
        if self._left < 0:
            raise TemplateProblem(
                f"the template does more for this row than {MAX_WORK} characters' work: shorten its loops "
                "and texts"
            )
        return ""

    def tilde(self, *values: Any) -> str:
        """What `~` does."""
        return "".join([self._written(value) for value in values])

    def built(self, value: Any) -> Any:
        """Count a list, tuple or dict that a template makes, with all in it: what stands in it twice, and
        again in the next one, doubles each time."""
        self._weigh(value)
        return value

    def searched(self, container: Any) -> Any:
        """Count what `in` looks through."""
        self.charge(_size(container))
        return container

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            before = self._left
            self._weigh(sized)
            self.charge((before - self._left) * max(0, times) if isinstance(times, int) else 0)
        elif isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
            if operator != "%" and bits > MAX_BITS:
                raise TemplateProblem(f"a number of more than {MAX_BITS} bits")
        if operator == "+":
            self._weigh(left)
            self._weigh(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check_call(__obj, args, kwargs)
        if getattr(__obj, "__self__", None).__class__ is str and __obj.__name__ in ("join", "replace"):
            guarded = __self._joined if __obj.__name__ == "join" else __self._replace
            named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # a loop's
            return guarded(__obj.__self__, *args, **named)
        return super().call(__context, __obj, *args, **kwargs)

    def _check_call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TemplateProblem for a function that is not on the list; count what it works on."""
        if function in self._own or isinstance(function, Macro | LoopContext):
            return
        if function in (self.globals["dict"], self.globals["namespace"]):
            for value in (*args, *kwargs.values()):
                self._weigh(value)
            return
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, LoopContext):  # cycle, changed
            return
        if not any(isinstance(owner, kind) and name in names for kind, names in METHODS.items()):
            raise TemplateProblem(f"a template cannot call {name or type(function).__name__!r}")
        if name == "strftime" and (len(str(args)) > 100 or re.search(r"%[^a-zA-Z%]*\d", str(args))):
            raise TemplateProblem("a format of a time is too long, or has widths")
        if not isinstance(owner, dict):
            self.charge(_size(owner) + sum(map(_size, args)))

    def _counted(self, tree: nodes.Template) -> nodes.Template:
        """Put counting into a template: at the start of loops and macros, at `~`, and at `in`."""
        loops: Iterable[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for loop in loops:
            literals = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            cost = nodes.Const(TURN + literals)
            if isinstance(loop, nodes.For) and loop.test is not None:  # what it leaves out makes no turn
                loop.iter = _call("searched", [loop.iter])
            loop.body.insert(0, nodes.ExprStmt(_call("charge", [cost]), lineno=loop.lineno))
        for operand in list(tree.find_all(nodes.Operand)):
            if operand.op in ("in", "notin"):
                operand.expr = _call("searched", [operand.expr])
        _intercept(tree)
        tree.set_environment(self)
        return tree

    def _written(self, value: Any) -> str:
        """Return what stands in the text for a value. Raises TemplateProblem for null."""
        if value is None:
            raise TemplateProblem(
                "a value that the template writes is null: give it a default, such as {{ name or 'none' }}"
            )
        if isinstance(value, list | dict | tuple):
            return self._tojson(value)
        if not isinstance(value, _WRITTEN):
            raise TemplateProblem(f"a value of type {type(value).__name__} has no text")
        text = str(value)
        self.charge(len(text))
        return text

    def _weigh(self, value: Any) -> None:
        """Count a value with all that is in it, as often as it is."""
        self.charge(_size(value) + ITEM)
        if isinstance(value, dict):
            for key, item in value.items():
                self._weigh(key)
                self._weigh(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self._weigh(item)

    def _tojson(self, value: Any, indent: int | None = None) -> str:
        self._weigh(value)
        text = to_json(value, _width(indent))
        self.charge(len(text))
        return text

    def _range(self, *limits: int) -> range:
        found = range(*limits)
        self.charge(len(found))
        return found

    def _join(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        items = list(value)
        if attribute is not None:
            items = [self.getitem(each, attribute) for each in items]
        return self._joined(d, items)

    def _joined(self, separator: str, items: Iterable[Any]) -> str:
        texts = [self._written(each) for each in items]
        self.charge(len(separator) * len(texts))
        return separator.join(texts)

    def _replace(self, text: Any, old: str, new: str, count: int = -1) -> str:
        text = self._written(text)
        self.charge(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        return str(text.replace(old, new, -1 if count is None else count))

    def _check_format(self, form: str, values: Any) -> None:
        if _FORMAT_WIDTH.search(form):
            raise TemplateProblem("a width of a % format has more than three digits, or is a value")
        each = (
            values.values()
            if isinstance(values, Mapping)
            else values
            if isinstance(values, tuple)
            else (values,)
        )
        longest = max((len(self._written(value)) for value in each), default=0)
        self.charge(len(form) + form.count("%") * longest)

    def _limited(self, name: str) -> Callable[..., Any]:
        """Return one of Jinja's filters that counts what it is given, and what it gives."""
        function = jinja2.filters.FILTERS[name]
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            given = (*args[skipped:], *kwargs.values())
            for each in () if name in _QUICK else given:
                self._weigh(each)
            if name in ("indent", "round"):
                widths = [each for each in given[1:] if isinstance(each, int | str)]
                width = max((len(_) if isinstance(_, str) else _width(_) or 0 for _ in widths), default=4)
                self.charge(str(given[0]).count("\n") * width)
            found = function(*args, **kwargs)
            self.charge(_size(found))
            return found

        return limited


def _call(method: str, args: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _intercept(node: nodes.Node) -> None:
    """Put calls of ours in the place of each `~` below a node, and around each list, tuple and dict."""
    for child in node.iter_child_nodes():
        _intercept(child)
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _intercepted(value))
        elif isinstance(value, list):
            value[:] = [_intercepted(each) for each in value]


def _intercepted(node: Any) -> Any:
    if isinstance(node, nodes.Concat):
        return _call("tilde", node.nodes)
    makes = isinstance(node, nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    return _call("built", [node]) if makes else node


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | dict | tuple | range) else 1


def _width(value: Any) -> int | None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateProblem(f"a width of {value}, more than {MAX_WIDTH}")
    return value if isinstance(value, int) else None
