"""Code search against the standard `ast`, on three real repositories."""

import ast
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.bench.sources import DJANGO, SCIKIT_LEARN, SYMPY
from palestra.errors import UsageError
from palestra.sources import Source, fetch
from palestra.tools.code import CodeIndex, Symbol


def truth(path: str, node: ast.AST, prefix: str = "", around: str = "module") -> Iterator[Symbol]:
    """Classes and functions at any depth, and what modules and classes assign to plain names."""
    for child in _statements(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(child, ast.ClassDef) else "method" if around == "class" else "function"
            assert child.end_lineno is not None
            yield Symbol(path, prefix + child.name, kind, child.lineno, child.end_lineno)
            yield from truth(path, child, f"{prefix}{child.name}.", kind)
            continue
        if around in ("module", "class") and isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            assert child.end_lineno is not None
            for target in targets:
                for name in _names(target):
                    yield Symbol(path, prefix + name, "variable", child.lineno, child.end_lineno)
        yield from truth(path, child, prefix, around)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a block. No expression holds a definition, and most of a tree is expressions."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, block, ())
        yield from inner if isinstance(inner, list) else ()


def _names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _names(part)
        case ast.Starred(value=inner):
            yield from _names(inner)


def parsed(root: Path, path: str) -> ast.Module | None:
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse((root / path).read_bytes())
        except (SyntaxError, ValueError):
            return None  # syntax of a later Python, or broken on purpose


@pytest.mark.parametrize("source", [DJANGO, SYMPY, SCIKIT_LEARN], ids=lambda source: source.project)
def test_definitions_are_those_of_ast(source: Source, tmp_path: Path) -> None:
    try:
        root = fetch(source)
    except UsageError as error:
        pytest.skip(f"{source.archive} cannot be had: {error}")
    index = CodeIndex(root, cache=tmp_path)
    paths = [path for path in index.files.listing() if path.endswith(".py")]
    assert len(paths) == len([path for path in root.rglob("*.py") if not any(part.startswith(".") for part in path.parts[-4:-1])])
    true: Counter[Symbol] = Counter()
    found: Counter[Symbol] = Counter()
    compared = set()
    for path in paths:
        tree = parsed(root, path)
        if tree is not None:
            compared.add(path)
            true.update(truth(path, tree))
            found.update(index.outline(path))
    assert len(compared) > 0.99 * len(paths)

    def kept(symbols: Counter[Symbol], variables: bool) -> Counter[Symbol]:
        return Counter({each: count for each, count in symbols.items() if (each.kind == "variable") == variables})

    assert sum(kept(true, variables=False).values()) > 10_000
    assert kept(found, variables=False) == kept(true, variables=False)
    constants = kept(true, variables=True)
    assert (constants & kept(found, variables=True)).total() >= 0.999 * constants.total()
    assert (kept(found, variables=True) - constants).total() <= 0.001 * constants.total()
    _assert_found_by_name(index, list(true), compared)


def _assert_found_by_name(index: CodeIndex, true: list[Symbol], paths: set[str]) -> None:
    """Each of a sample is found by its whole name and by its last part, with all others of that name and no more."""
    by_last: dict[str, set[Symbol]] = {}
    for symbol in true:
        if symbol.kind != "variable":
            by_last.setdefault(symbol.name.rpartition(".")[2], set()).add(symbol)
    for last in random.Random(0).sample(sorted(by_last), 500):
        answer = {symbol for symbol in index.symbol(last) if symbol.kind != "variable" and symbol.path in paths}
        assert answer == by_last[last]
        for symbol in by_last[last]:
            assert symbol in index.symbol(symbol.name, symbol.kind, symbol.path)
