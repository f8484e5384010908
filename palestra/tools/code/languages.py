"""The languages that are searched: their file names, and for each but Python the tree-sitter nodes that define something.

Grammars are loaded when a file of their language is first parsed.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal

from tree_sitter import Language as Grammar

from palestra.tools.code.symbols import Kind

Role = Kind | Literal["scope", "declarator"]
"""A scope qualifies the names in it and is no symbol itself; a declarator is a function or a variable, as its value says."""


@dataclass(frozen=True)
class Language:
    name: str
    suffixes: tuple[str, ...]
    nodes: Mapping[str, Role] = field(default_factory=dict)
    imports: re.Pattern[str] | None = None
    """Its one group that matches is the module."""
    package: str = ""
    loader: str = "language"

    @functools.cached_property
    def grammar(self) -> Grammar:
        return Grammar(getattr(import_module(self.package), self.loader)())


_JS_IMPORT = re.compile(
    r"""^[ \t]*(?:import|export)\b[^;'"]*?['"]([^'"\n]+)['"]|\b(?:require|import)\([ \t]*['"]([^'"\n]+)['"]""", re.MULTILINE
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)

_JAVASCRIPT: dict[str, Role] = {
    "class_declaration": "class",
    "function_declaration": "function",
    "generator_function_declaration": "function",
    "method_definition": "method",
    "field_definition": "declarator",
    "variable_declarator": "declarator",
}
_TYPESCRIPT: dict[str, Role] = {name: role for name, role in _JAVASCRIPT.items() if name != "field_definition"} | {
    "abstract_class_declaration": "class",
    "interface_declaration": "class",
    "enum_declaration": "class",
    "type_alias_declaration": "class",
    "function_signature": "function",
    "method_signature": "method",
    "abstract_method_signature": "method",
    "public_field_definition": "declarator",
    "internal_module": "scope",
}
_C: dict[str, Role] = {
    "struct_specifier": "class",
    "union_specifier": "class",
    "enum_specifier": "class",
    "type_definition": "class",
    "function_definition": "function",
    "preproc_function_def": "function",
    "preproc_def": "variable",
    "init_declarator": "variable",
    "enumerator": "variable",
}
_GO: dict[str, Role] = {
    "type_spec": "class",
    "type_alias": "class",
    "function_declaration": "function",
    "method_declaration": "method",
    "method_elem": "method",
    "const_spec": "variable",
    "var_spec": "variable",
}
_RUST: dict[str, Role] = {
    "struct_item": "class",
    "enum_item": "class",
    "union_item": "class",
    "trait_item": "class",
    "type_item": "class",
    "function_item": "function",
    "function_signature_item": "function",
    "macro_definition": "function",
    "const_item": "variable",
    "static_item": "variable",
    "impl_item": "scope",
    "mod_item": "scope",
}
_JAVA: dict[str, Role] = {
    "class_declaration": "class",
    "interface_declaration": "class",
    "enum_declaration": "class",
    "record_declaration": "class",
    "annotation_type_declaration": "class",
    "method_declaration": "method",
    "constructor_declaration": "method",
    "variable_declarator": "variable",
    "enum_constant": "variable",
}

PYTHON = Language("python", (".py", ".pyi"))
LANGUAGES = (
    PYTHON,
    Language("javascript", (".js", ".jsx", ".mjs", ".cjs"), _JAVASCRIPT, _JS_IMPORT, "tree_sitter_javascript"),
    Language("typescript", (".ts", ".mts", ".cts"), _TYPESCRIPT, _JS_IMPORT, "tree_sitter_typescript", "language_typescript"),
    Language("tsx", (".tsx",), _TYPESCRIPT, _JS_IMPORT, "tree_sitter_typescript", "language_tsx"),
    Language(
        "go", (".go",), _GO, re.compile(r'^(?:import[ \t]+)?[ \t]*(?:[\w.]+[ \t]+)?"([^"\n]+)"[ \t]*$', re.M), "tree_sitter_go"
    ),
    Language(
        "rust",
        (".rs",),
        _RUST,
        re.compile(r"^[ \t]*(?:pub(?:\([^)]*\))?[ \t]+)?(?:use|mod)[ \t]+([\w:]+)", re.M),
        "tree_sitter_rust",
    ),
    Language("java", (".java",), _JAVA, re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]+)", re.M), "tree_sitter_java"),
    Language("c", (".c",), _C, _INCLUDE, "tree_sitter_c"),
    Language(
        "cpp",
        (".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".cu", ".cuh"),
        _C | {"class_specifier": "class", "alias_declaration": "class", "namespace_definition": "scope"},
        _INCLUDE,
        "tree_sitter_cpp",
    ),
)
BY_SUFFIX = {suffix: language for language in LANGUAGES for suffix in language.suffixes}


def language_of(path: str) -> Language | None:
    return BY_SUFFIX.get(path[path.rfind(".") :].lower())
