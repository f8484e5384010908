"""One issue of a data set, whatever its fields are called there: SWE-bench (with or without its environment's pins), SWE-Gym, or
R2E-Gym. What is missing or of another type is said in one line.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.errors import TaskError

R2E_PARSER = "r2e"
"""R2E-Gym names a test by its class and function alone, with a dot between."""
_R2E_TESTS = "r2e_tests"
_OFFICIAL, _SWE_GYM = "swebench/sweb.eval.x86_64.{}:latest", "xingyaoww/sweb.eval.x86_64.{}:latest"


@dataclass(frozen=True)
class Instance:
    id: str
    repo: str
    """owner/name"""
    base_commit: str
    problem: str
    patch: str
    """The fix that was merged."""
    test_patch: str
    fails: tuple[str, ...]
    """FAIL_TO_PASS"""
    passes: tuple[str, ...]
    """PASS_TO_PASS"""
    version: str = ""
    environment_yml: str = ""
    """The packages of the official environment, as conda writes them."""
    eval_sh: str = ""
    """The official script that runs the tests."""
    parser: str = ""
    """The official log parser; that of the repository when not given."""
    image: str = ""
    """The container image that has it all."""


def from_row(row: Mapping[str, Any], where: str) -> Instance:
    """A row of a data set; `where` names the row in what is said about it."""
    if "repo_name" in row and "expected_output_json" in row:
        return _r2e(row, where)
    name = _text(row, "instance_id", where)
    return Instance(
        id=name,
        repo=_text(row, "repo", where),
        base_commit=_text(row, "base_commit", where),
        problem=_text(row, "problem_statement", where),
        patch=_text(row, "patch", where),
        test_patch=_text(row, "test_patch", where),
        fails=_names(row, "FAIL_TO_PASS", where),
        passes=_names(row, "PASS_TO_PASS", where),
        version=_text(row, "version", where, ""),
        environment_yml=_text(row, "environment_yml", where, ""),
        eval_sh=_text(row, "eval_sh", where, ""),
        parser=_text(row, "log_parser", where, ""),
        image=_text(row, "image_name", where, "") or _text(row, "docker_image", where, "") or _image(row, name),
    )


def _image(row: Mapping[str, Any], name: str) -> str:
    """Names of images have no double underscore; each data set has its own way out."""
    if "environment_setup_commit" in row:
        return _OFFICIAL.format(name.lower().replace("__", "_1776_"))
    return _SWE_GYM.format(name.lower().replace("__", "_s_"))


def _r2e(row: Mapping[str, Any], where: str) -> Instance:
    """Its tests come as files, and what they should say as one object. Its images have the repository before the commit."""
    repo, commit = _text(row, "repo_name", where), _text(row, "commit_hash", where)
    expected = _object(row, "expected_output_json", where)
    ran = _object(row, "execution_result_content", where)
    try:
        tests = dict(zip(ran["test_file_names"], ran["test_file_codes"], strict=True))
        new_files = "".join(new_file(f"{_R2E_TESTS}/{name}", code) for name, code in tests.items())
    except (KeyError, ValueError, TypeError, AttributeError):
        raise TaskError(f"{where}: execution_result_content has no test_file_names with test_file_codes") from None
    passed = sorted(name.split(" - ")[0] for name, status in expected.items() if status == "PASSED")
    return Instance(
        id=f"{repo}-{commit[:12]}",
        repo=repo,
        base_commit=commit,
        problem=_text(row, "problem_statement", where),
        patch=_text(row, "patch", where, "") or _r2e_patch(row, where),
        test_patch=new_files,
        fails=tuple(passed),
        passes=(),
        eval_sh=f": '>>>>> Start Test Output'\npython -W ignore -m pytest -rA {_R2E_TESTS}\n: '>>>>> End Test Output'\n",
        parser=R2E_PARSER,
        image=_text(row, "docker_image", where),
    )


def _r2e_patch(row: Mapping[str, Any], where: str) -> str:
    """The commit's change of files that are no tests, from their contents before and after."""
    parts = []
    for file in _object(row, "parsed_commit_content", where).get("file_diffs", ()):
        path = file["header"]["file"]["path"]
        if "test" not in path:
            parts.append(_changed(path, file.get("old_file_content") or "", file.get("new_file_content") or ""))
    return "".join(parts)


def new_file(path: str, text: str) -> str:
    """A diff that adds a file."""
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n" + _hunks("/dev/null", f"b/{path}", "", text)


def _changed(path: str, old: str, new: str) -> str:
    return f"diff --git a/{path} b/{path}\n" + _hunks(f"a/{path}", f"b/{path}", old, new)


def _hunks(old_name: str, new_name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), old_name, new_name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _text(row: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = row.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or (not value and default is None):
        known = ", ".join(sorted(row))
        raise TaskError(f"{where}: the field {key!r} {_fault(value)}; it must be a text (fields here: {known[:300]})")
    return value


def _fault(value: object) -> str:
    return "is missing" if value is None else "is empty" if value == "" else f"is of type {type(value).__name__}"


def _names(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of tests, which some data sets write as JSON in a text."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise TaskError(f"{where}: {key} is neither a list nor a list as JSON: {value[:60]!r}") from None
    names = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TaskError(f"{where}: {key} {_fault(value)}; it must be a list of test names")
    return names


def _object(row: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_text(row, key, where))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TaskError(f"{where}: {key} is no JSON object")
    return value


def unique(instances: Sequence[Instance], where: str) -> Sequence[Instance]:
    seen: set[str] = set()
    for each in instances:
        if each.id in seen:
            raise TaskError(f"{where} has two rows with the id {each.id!r}")
        seen.add(each.id)
    return instances
