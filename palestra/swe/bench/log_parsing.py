"""Runs beside Palestra, in a Python process of its own: the `swebench` package's log parsers on one log, or what it knows of
all versions of its repositories. Arguments: its folder, then `parse NAME` with the log on stdin, or `specs`. Prints JSON.
"""

import importlib
import json
import sys
from types import ModuleType


def main(folder: str, what: str, *names: str) -> None:
    # The packages' own __init__ load docker, modal and datasets, of which no parser needs anything; so they are not run.
    for package in ("swebench", "swebench.harness", "swebench.harness.log_parsers", "swebench.harness.test_spec"):
        module = ModuleType(package)
        module.__path__ = ["/".join((folder, *package.split(".")))]
        sys.modules[package] = module
    # The parsers name this class in their signatures, and never look at what they are given.
    annotation = ModuleType("swebench.harness.test_spec.test_spec")
    annotation.TestSpec = object  # type: ignore[attr-defined]
    sys.modules[annotation.__name__] = annotation
    if what == "parse":
        parsers = importlib.import_module("swebench.harness.log_parsers.python")
        [name] = names
        parser = parsers.MAP_REPO_TO_PARSER_PY.get(name) or getattr(parsers, name, parsers.parse_log_pytest)
        log = sys.stdin.buffer.read().decode("utf-8", "replace")
        # Parsers believe the last that a log says of a test. What any of its lines says is told beside it.
        each = [parser(line, None) for line in log.split("\n")]
        failed = {test for said in each for test, status in said.items() if status == "FAILED"}
        found = {"statuses": parser(log, None), "failed": sorted(failed)}
    else:
        constants = importlib.import_module("swebench.harness.constants")
        found = constants.MAP_REPO_VERSION_TO_SPECS
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
