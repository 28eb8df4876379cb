"""Single-line bugs for `benchmarks.mutants`: what a slip of the pen makes of a source file.

A comparison, a sign, a bound, a constant, a condition, a keyword argument or a statement of one
line, changed or left out. Not changed: annotations, decorators, strings, imports, ``strict=True``,
what is raised and what is logged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
OPERATORS = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: (r"\*\*", "*"),
    ast.MatMult: ("@", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}  # functions and methods
METHODS = {
    **NAMES,
    "amax": "amin",
    "amin": "amax",
    "argmax": "argmin",
    "floor": "ceil",
    "ceil": "floor",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "mean": "sum",
    "sum": "mean",
}
SPEAK = ("log", "warnings", "print")  # what is called to tell somebody
KEPT = ("annotation", "returns", "decorator_list", "bases", "exc", "cause", "msg")  # fields
Change = tuple[ast.expr | ast.stmt, str]  # what is replaced, by what
Said = Callable[[ast.AST], str]  # the source of a node


@dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        function: the outermost function or method around it; "" at the level of a module or class.
        begin, end: the columns replaced by ``new``, in characters.
    """

    file: str
    function: str
    line: int
    text: str
    begin: int
    end: int
    new: str

    @property
    def place(self) -> str:
        """Its line, wherever that moves to."""
        return f"{self.file}: {self.text.strip()}"

    @property
    def key(self) -> str:
        """What it is, wherever the line moves to."""
        old = self.text[self.begin : self.end]
        return f"{self.place} [{old} -> {self.new}]"

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.text, "the file has changed"
        lines[self.line - 1] = f"{self.text[: self.begin]}{self.new}{self.text[self.end :]}\n"
        return "".join(lines)


def mutants(file: str, source: str) -> list[Mutant]:
    """All of a file that still parse, each key once."""
    lines, found = source.splitlines(), dict[str, Mutant]()
    for node, function in _walk(ast.parse(source), ()):
        for part, new in _changes(node, source):
            text = lines[part.lineno - 1]
            if part.lineno != part.end_lineno or not text.isascii():
                continue
            begin, end = part.col_offset, part.end_col_offset or 0
            mutant = Mutant(file, function, part.lineno, text, begin, end, new)
            try:
                ast.parse(mutant.applied(source))
            except SyntaxError:
                continue
            found.setdefault(mutant.key, mutant)
    return list(found.values())


def _walk(node: ast.AST, names: tuple[str, ...], inside: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Nodes that may change, with the function around them."""
    yield node, inside
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if field in KEPT or not isinstance(child, ast.AST) or _left_alone(child):
                continue
            if isinstance(child, ast.ClassDef) and not inside:
                yield from _walk(child, (*names, child.name))
            elif isinstance(child, ast.FunctionDef) and not inside:
                yield from _walk(child, names, ".".join((*names, child.name)))
            else:
                yield from _walk(child, names, inside)


def _left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.keyword(arg="strict"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)):
            return ast.unparse(func).split(".")[0] in SPEAK
    return False


def _changes(node: ast.AST, source: str) -> Iterator[Change]:
    def said(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=ops, comparators=rest):
            for before, op, after in zip([left, *rest], ops, rest, strict=False):
                yield from _between(node, before, after, *COMPARISONS[type(op)], said)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):
                yield from _between(node, left, right, *OPERATORS[type(op)], said)
        case ast.BoolOp(op=op, values=[*values]):
            for before, after in pairwise(values):
                yield from _between(node, before, after, *OPERATORS[type(op)], said)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, f"({said(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield node, f"{said(orelse)} if {said(test)} else {said(body)}"
        case ast.If(test=test) | ast.comprehension(ifs=[test]):
            yield test, "False"
        case ast.Slice(lower=lower, upper=upper):
            yield from ((bound, "") for bound in (lower, upper) if bound)
        case ast.Expr() | ast.AugAssign() | ast.Break() | ast.Continue():
            yield node, "pass"
        case ast.Call(func=func):
            yield from _calls(node, func, said)


def _between(
    node: ast.expr, before: ast.expr, after: ast.expr, old: str, new: str, said: Said
) -> Iterator[Change]:
    """The operator between two operands of a node of one line; parentheses stay."""
    if node.lineno == node.end_lineno:
        start = node.col_offset
        text, a = said(node), (before.end_col_offset or 0) - start
        b = after.col_offset - start
        yield node, text[:a] + re.sub(old, new, text[a:b], count=1) + text[b:]


def _calls(node: ast.Call, func: ast.expr, said: Said) -> Iterator[Change]:
    """Another function, or an argument less."""
    match func:
        case ast.Name(id=name) if name in NAMES:
            yield func, NAMES[name]
        case ast.Attribute(attr=name) if name in METHODS:
            yield func, said(func).removesuffix(name) + METHODS[name]
    for word in node.keywords:
        if word.arg not in (None, "strict"):
            rest = [*node.args, *(other for other in node.keywords if other is not word)]
            yield node, f"{said(func)}({', '.join(map(said, rest))})"
