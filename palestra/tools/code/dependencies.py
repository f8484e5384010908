"""Imports as files of the tree: what a file needs, and who needs it. What cannot be found in the tree comes from elsewhere."""

import posixpath
from collections.abc import Iterator, Mapping, Sequence

from palestra.tools.code.languages import PYTHON, language_of
from palestra.tools.code.symbols import Dependency, Import

_INDEX = ("__init__.py", "index.js", "index.ts", "index.tsx", "mod.rs")


def word_of(path: str) -> str:
    """The word that stands in every absolute import of this file."""
    folder, name = posixpath.split(path)
    return posixpath.basename(folder) if name in _INDEX else name.partition(".")[0]


def beside(path: str, known: Mapping[str, object]) -> Iterator[str]:
    """The files that may import this one without its name: `from . import …`."""
    folder, name = posixpath.split(path)
    if name in _INDEX:
        prefix = f"{folder}/" if folder else ""
        yield from (each for each in known if each.startswith(prefix))


def outwards(path: str, imports: Sequence[Import], known: Mapping[str, object]) -> list[Dependency]:
    resolve = _python if language_of(path) is PYTHON else _other
    return [
        Dependency(path, each.start, each.module, target)
        for each in imports
        for target in dict.fromkeys(resolve(path, each, known)) or ("",)
    ]


def _python(path: str, statement: Import, known: Mapping[str, object]) -> Iterator[str]:
    module = statement.module
    dots = len(module) - len(module.lstrip("."))
    if dots:
        folder = posixpath.dirname(path)
        for _ in range(dots - 1):
            folder = posixpath.dirname(folder)
        roots = [folder]
    else:
        roots = list(_roots(path))
    parts = [part for part in module.strip(".").split(".") if part]
    for root in roots:
        here = posixpath.join(root, *parts)
        inner = [found for name in statement.names if (found := _module(posixpath.join(here, name), known))]
        itself = _module(here, known)
        if inner or itself:
            yield from inner
            if itself and len(inner) < max(1, len(statement.names)):
                yield itself
            return


def _roots(path: str) -> Iterator[str]:
    """Folders from which absolute imports may start: the root, `src`, and those above the file, outermost first."""
    yield ""
    yield "src"
    parts = posixpath.dirname(path).split("/")
    yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1) if parts[0])


def _module(stem: str, known: Mapping[str, object]) -> str:
    candidates = (f"{stem}.py", f"{stem}/__init__.py", f"{stem}.pyi", "__init__.py" if not stem else "")
    return next((each for each in candidates if each in known), "")


def _other(path: str, statement: Import, known: Mapping[str, object]) -> Iterator[str]:
    module = statement.module
    suffix = path[path.rfind(".") :]
    if module.startswith("."):  # JavaScript and TypeScript: relative to the file
        here = posixpath.normpath(posixpath.join(posixpath.dirname(path), module))
        stem = here[: here.rfind(".")] if here.endswith((".js", ".jsx", ".mjs")) else here
        endings = ("", ".ts", ".tsx", ".js", ".jsx", ".mjs", ".d.ts", "/index.ts", "/index.tsx", "/index.js")
        yield from [each for base in (here, stem) for end in endings if (each := base + end) in known][:1]
    elif suffix in (".java", ".rs"):
        parts = [part for part in module.replace("::", ".").split(".") if part not in ("crate", "self", "super", "")]
        for count in range(len(parts), 0, -1):  # the last parts may be names inside the file
            tail = "/".join(parts[:count])
            found = _ending((f"{tail}{suffix}", f"{tail}/mod.rs"), known)
            if found:
                yield from found
                return
    elif suffix == ".go":
        folder = "/".join(module.split("/")[-2:])
        yield from (each for each in known if f"/{each}".rpartition("/")[0].endswith(f"/{folder}") and each.endswith(".go"))
    else:  # C and C++
        beside_it = posixpath.normpath(posixpath.join(posixpath.dirname(path), module))
        yield from [beside_it] if beside_it in known else _ending((module,), known)


def _ending(tails: Sequence[str], known: Mapping[str, object]) -> list[str]:
    return [each for each in known if any(f"/{each}".endswith(f"/{tail}") for tail in tails)][:3]
