"""Every place in a source file where a small change could be a bug, and the change: operators, constants, conditions, arguments,
branches, statements, whole bodies. Only inside functions; a docstring is never touched.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.swe.factory.edit import Edit, Text

Kind = Literal["compare", "arithmetic", "boolean", "constant", "negate", "swap", "branch", "statement", "returned", "body"]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    kind: Kind
    edit: Edit
    symbol: str
    """The function that it is in, with the classes and functions around it."""
    line: int
    """Where that function begins, decorators included, as its code object has it."""
    lines: int
    """How many lines the function has."""


@dataclass(frozen=True, slots=True)
class Function:
    node: FunctionNode
    symbol: str

    @property
    def line(self) -> int:
        return min([self.node.lineno, *(decorator.lineno for decorator in self.node.decorator_list)])

    @property
    def body(self) -> list[ast.stmt]:
        """Without the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body


def functions(tree: ast.AST, around: str = "") -> Iterator[Function]:
    """Every function and method, those inside others too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode | ast.ClassDef):
            name = f"{around}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield Function(node, name)
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, around)


def mutations(path: str, data: bytes) -> list[Mutation]:
    """All of a file, in the order of their places."""
    text = Text(data)
    found: list[Mutation] = []
    for function in functions(ast.parse(data)):
        lines = (function.node.end_lineno or 0) - function.line + 1
        for kind, start, old, new in _sites(function, text):
            if old != new and text.of(start, start + len(old.encode())) == old:
                found.append(Mutation(kind, Edit(path, start, old, new), function.symbol, function.line, lines))
    return sorted(found, key=lambda mutation: (mutation.edit.start, mutation.edit.new))


Site = tuple[Kind, int, str, str]


def _sites(function: Function, text: Text) -> Iterator[Site]:
    for statement in function.body:
        for node in _own(statement):
            yield from _expression(node, text)
            yield from _statement(node, text)
    yield from _body(function, text)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it, but not what belongs to a function or class inside, nor annotations and f-strings, whose places in
    the text are not what they seem."""
    if isinstance(node, FunctionNode | ast.ClassDef | ast.JoinedStr | ast.Assert):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _own(child)


def _expression(node: ast.AST, text: Text) -> Iterator[Site]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield from _between("compare", left, right, *_COMPARE[type(op)], text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC and not _is_text(left):
            yield from _between("arithmetic", left, right, *_ARITHMETIC[type(op)], text)
        case ast.BoolOp(op=op, values=[left, right, *_]):
            words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield from _between("boolean", left, right, *words, text)
        case ast.Constant(value=bool(value)):
            yield "constant", text.start(node), str(value), str(not value)
        case ast.Constant(value=int(value)) if text.code(node) == str(value):
            yield "constant", text.start(node), str(value), str(value + 1)
            if value > 0:
                yield "constant", text.start(node), str(value), str(value - 1)
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            start, end = text.start(first), text.end(second)
            middle = text.of(text.end(first), text.start(second))
            yield "swap", start, text.of(start, end), f"{text.code(second)}{middle}{text.code(first)}"


def _statement(node: ast.AST, text: Text) -> Iterator[Site]:
    match node:
        case ast.If(test=test, body=body) | ast.While(test=test, body=body):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.NamedExpr):
                code = text.code(test)
                yield "negate", text.start(test), code, code[4:] if code.startswith("not ") else f"not ({code})"
            if isinstance(node, ast.If) and not any(isinstance(inner, ast.Pass) for inner in body):
                yield _replaced("branch", body, "pass", text)
        case (
            ast.Expr(value=ast.Call())
            | ast.AugAssign()
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.Continue()
        ):
            yield _replaced("statement", [node], "pass", text)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returned", text.start(value), text.code(value), "None"


def _body(function: Function, text: Text) -> Iterator[Site]:
    if function.body and not (len(function.body) == 1 and isinstance(function.body[0], ast.Pass | ast.Raise)):
        yield _replaced("body", function.body, "raise NotImplementedError", text)


def _replaced(kind: Kind, statements: Sequence[ast.stmt], new: str, text: Text) -> Site:
    start, end = text.start(statements[0]), text.end(statements[-1])
    return kind, start, text.of(start, end), new


def _between(kind: Kind, left: ast.expr, right: ast.expr, old: str, new: str, text: Text) -> Iterator[Site]:
    """The operator stands between its operands, maybe with brackets around it."""
    start, end = text.end(left), text.start(right)
    between = text.of(start, end)
    if "#" not in between and between.count(old) == 1 and between.strip(" ()\n\t\\") == old:
        yield kind, start + len(between[: between.index(old)].encode()), old, new


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
