"""Definitions in other languages than Python, by tree-sitter; where a file does not parse, by its lines as well."""

from collections.abc import Iterator

from tree_sitter import Node, Parser, Query, QueryCursor, Tree

from palestra.tools.code import braces
from palestra.tools.code.languages import Language, Role
from palestra.tools.code.symbols import Definition, Kind

_QUERIES: dict[str, Query] = {}
_FUNCTIONS = ("arrow_function", "function_expression", "generator_function")
_BARE = ("identifier", "type_identifier", "field_identifier", "property_identifier")


def parse(language: Language, text: str) -> Tree:
    return Parser(language.grammar).parse(text.encode())


def definitions(language: Language, text: str) -> tuple[Definition, ...]:
    tree = parse(language, text)
    found = list(_definitions(language, tree))
    if tree.root_node.has_error:
        known = {(definition.name.rpartition(".")[2], definition.start) for definition in found}
        further = (each for each in braces.definitions(text) if (each.name.rpartition(".")[2], each.start) not in known)
        found = sorted([*found, *further], key=lambda definition: definition.start)
    return tuple(found)


def in_code(tree: Tree, start: int, end: int) -> bool:
    """Whether these bytes stand outside strings and comments."""
    node = tree.root_node.descendant_for_byte_range(start, end)
    while node is not None:
        if node.type in ("template_substitution", "interpolation"):
            return True
        if "comment" in node.type or "string" in node.type or node.type == "char_literal":
            return False
        node = node.parent
    return True


def _definitions(language: Language, tree: Tree) -> Iterator[Definition]:
    if language.name not in _QUERIES:
        _QUERIES[language.name] = Query(language.grammar, f"[{' '.join(f'({node})' for node in language.nodes)}] @it")
    nodes = QueryCursor(_QUERIES[language.name]).captures(tree.root_node).get("it", [])
    scopes: list[tuple[int, str, Role]] = []  # where it ends, its qualified name, what it is
    for node in sorted(nodes, key=lambda node: (node.start_byte, -node.end_byte)):
        while scopes and scopes[-1][0] <= node.start_byte:
            scopes.pop()
        name = _name(node)
        if not name or _only_mentions(node):
            continue
        _, around, outer = scopes[-1] if scopes else (0, "", None)
        role = _role(language.nodes[node.type], node)
        if role == "variable" and (outer in ("function", "method") or _is_local(node)):
            continue
        if role == "function" and (outer == "class" or (outer == "scope" and _is_method(node)) or "." in name):
            role = "method"
        qualified = f"{around}.{name}" if around else name
        if role != "variable":
            scopes.append((node.end_byte, qualified, role))
        if role != "scope":
            kind: Kind = role  # type: ignore[assignment]  # neither scope nor declarator is left
            yield Definition(qualified, kind, node.start_point.row + 1, _last_row(node) + 1)


def _last_row(node: Node) -> int:
    """The row of its last character: a preprocessor's node goes up to the beginning of the next line."""
    return node.end_point.row - (1 if node.end_point.column == 0 and node.end_point.row > node.start_point.row else 0)


def _role(role: Role, node: Node) -> Role:
    if role != "declarator":
        return role
    value = node.child_by_field_name("value")
    return "function" if value is not None and value.type in _FUNCTIONS else "variable"


def _is_local(node: Node) -> bool:
    """Whether a variable stands in a block of code: in an arrow function's body, or in a function that is no definition."""
    parent = node.parent
    while parent is not None:
        if parent.type in ("statement_block", "block", "compound_statement", "arrow_function", "for_statement"):
            return True
        parent = parent.parent
    return False


def _is_method(node: Node) -> bool:
    parent = node.parent
    return parent is not None and parent.parent is not None and parent.parent.type == "impl_item"


def _only_mentions(node: Node) -> bool:
    """`struct point p;` names a struct; only with a body does it define one."""
    return node.type in ("struct_specifier", "union_specifier", "enum_specifier", "class_specifier") and (
        node.child_by_field_name("body") is None
    )


def _name(node: Node) -> str:
    if node.type == "impl_item":
        return _bare(node.child_by_field_name("type"))
    if node.type == "method_declaration" and (receiver := node.child_by_field_name("receiver")) is not None:
        name = _bare(node.child_by_field_name("name"))
        return f"{_first(receiver, 'type_identifier')}.{name}"  # Go: the method of a type
    named = node.child_by_field_name("name") or node.child_by_field_name("property")
    while named is None and (inner := node.child_by_field_name("declarator")) is not None:  # C: int *(*name)(…)
        if not inner.child_by_field_name("declarator"):
            named = inner if inner.child_by_field_name("name") is None or inner.type == "qualified_identifier" else None
            named = named or inner.child_by_field_name("name")
        node = inner
    return _bare(named)


def _bare(node: Node | None) -> str:
    """A name as we write it: `a::b<T>` is `a.b`."""
    if node is None or node.text is None:
        return ""
    if node.type in ("array_pattern", "object_pattern"):
        return ""
    text = node.text.decode(errors="replace")
    return "".join(text.partition("<")[0].split()).replace("::", ".").strip("&*'\"")


def _first(node: Node, kind: str) -> str:
    waiting = [node]
    while waiting:
        each = waiting.pop(0)
        if each.type == kind:
            return _bare(each)
        waiting.extend(each.named_children)
    return ""
