"""Code search: symbols, references, imports and text of a repository, for programs (`CodeIndex`) and agents (`CodeSearch`)."""

from palestra.tools.code.index import CodeIndex
from palestra.tools.code.symbols import Dependency, Line, Reference, Symbol
from palestra.tools.code.tools import CodeSearch

__all__ = ["CodeIndex", "CodeSearch", "Dependency", "Line", "Reference", "Symbol"]
