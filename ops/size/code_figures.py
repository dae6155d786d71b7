"""Figures of Python code that say how squeezed it is, for each 1,000 lines of code."""

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LONG_LINE = 100

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class CodeFigures:
    """Counts of some files.

    code_lines: lines that hold code: no blank ones, comments or docstrings. long_lines: of more than 100 characters.
    tuple_assignments: statements that assign several values to several names. public_items: modules, and classes,
    functions and methods whose names have no underscore; documented_items: those with a docstring.
    """

    code_lines: int = 0
    comprehensions: int = 0
    tuple_assignments: int = 0
    walrus: int = 0
    long_lines: int = 0
    public_items: int = 0
    documented_items: int = 0

    def per_thousand(self, count: int) -> float:
        """Return a count for each 1,000 lines of code."""
        return 1000 * count / max(1, self.code_lines)

    @property
    def documented_share(self) -> float:
        """Return the share of public items that have a docstring."""
        return self.documented_items / max(1, self.public_items)


def figures_of(paths: Iterable[Path]) -> CodeFigures:
    """Count what some Python files hold."""
    figures = CodeFigures()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        code_lines = _code_lines(text, tree)
        figures.code_lines += len(code_lines)
        for number, line in enumerate(text.splitlines(), 1):
            figures.long_lines += number in code_lines and len(line) > LONG_LINE
        for node in ast.walk(tree):
            figures.comprehensions += isinstance(node, _COMPREHENSIONS)
            figures.walrus += isinstance(node, ast.NamedExpr)
            figures.tuple_assignments += _assigns_tuple(node)
        _count_documented(figures, tree, is_public=True)
    return figures


def _assigns_tuple(node: ast.AST) -> bool:
    """Whether a statement is like `a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def _count_documented(figures: CodeFigures, node: ast.AST, *, is_public: bool) -> None:
    """Count a module or class with what it holds; what stands inside functions is nobody's to read first."""
    if isinstance(node, ast.Module | ast.ClassDef) and is_public:
        figures.public_items += 1
        figures.documented_items += ast.get_docstring(node) is not None
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", "")
        is_child_public = is_public and not name.startswith("_")
        if isinstance(child, ast.ClassDef):
            _count_documented(figures, child, is_public=is_child_public)
        elif isinstance(child, _FUNCTIONS) and is_child_public:
            figures.public_items += 1
            figures.documented_items += ast.get_docstring(child) is not None
