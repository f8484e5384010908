"""Data sets from files and folders: JSON lines (plain or gzipped), parquet, or whatever the package `datasets` can open, which is
imported only when it is needed.
"""

import gzip
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from palestra.errors import TaskError
from palestra.swe.bench.instance import Instance, from_row, unique

LINES = (".jsonl", ".jsonl.gz", ".json")


def load(data: str, split: str = "test") -> list[Instance]:
    """All instances of a file, a folder that `datasets` wrote, or a data set that it knows by this name."""
    path = Path(data).expanduser()
    if path.is_file():
        rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
    elif path.is_dir() or (data.count("/") == 1 and not data.startswith((".", "/")) and not path.suffix):
        rows = _data_set(data, path, split)
    else:
        raise TaskError(f"no data set {data!r}: give a file ({', '.join(LINES)}, .parquet), a folder, or a name as owner/name")
    found = [from_row(row, f"{data}, row {number}") for number, row in enumerate(rows, 1)]
    if not found:
        raise TaskError(f"{data} has no rows")
    return list(unique(found, data))


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.name.endswith(LINES):
        raise TaskError(f"{path} ends with none of {', '.join((*LINES, '.parquet'))}, so nobody knows how to read it")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _row(line, f"{path}, line {number}")


def _row(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where}: {type(row).__name__}, not an object")
    return row


def _parquet(path: Path) -> Iterable[Mapping[str, Any]]:
    parquet = _package("pyarrow.parquet", "pyarrow", f"to read {path}")
    try:
        rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are among these
        raise TaskError(f"{path} is no parquet file: {error}") from None
    return rows


def _data_set(name: str, path: Path, split: str) -> Iterable[Mapping[str, Any]]:
    datasets = _package("datasets", "datasets", f"to open {name}")
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else name)
        rows: Iterable[Mapping[str, Any]] = found[split] if isinstance(found, dict) else found
    except KeyError:
        raise TaskError(f"{name} has no split {split!r}; it has {', '.join(found)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise TaskError(f"the data set {name} cannot be opened: {str(error).splitlines()[0]}") from None
    return rows


def _package(module: str, package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise TaskError(f"the package {package} is not installed, and is needed {purpose}: pip install {package}") from None
