"""What an instance asks for: read from its fields, and the same as the official table says for all of SWE-bench."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from swe.bench.conftest import PYTHON, SHARED, needs_data

from palestra.errors import TaskError, UsageError
from palestra.swe.bench import interpreters, plan
from palestra.swe.bench.instance import from_row
from palestra.swe.bench.loading import load
from palestra.swe.bench.runtime import Image, Native
from palestra.swe.bench.task import Issue


def test_packages_are_read_from_what_conda_wrote(issue: Issue) -> None:
    assert plan.packages(issue.instance) == plan.Packages(
        python=PYTHON,
        tools=("setuptools==75.1.0", "wheel==0.44.0"),
        pins=("packaging==24.1", "pluggy==1.5.0", "pytest==8.3.3"),
        conda=("iniconfig==2.0.0", "tabulate==0.8.3", "termcolor==1.1.0", "typing-extensions==4.12.2"),
    )
    with pytest.raises(TaskError, match=r"maker__abacus-1 has no environment_yml.*runtime = 'image'"):
        plan.packages(replace(issue.instance, environment_yml=""))
    with pytest.raises(TaskError, match="names no python"):
        plan.packages(replace(issue.instance, environment_yml="name: testbed"))


def test_the_script_is_read_and_made_native(issue: Issue) -> None:
    """What it feeds to commands is no part of it."""
    install = "python -m pip install . --no-deps --no-build-isolation"
    test = "pytest -rA tests/test_abacus.py"
    assert plan.script(issue.instance) == plan.Script((), (install,), ("export ABACUS=1",), test)
    assert Native("").test(issue.instance).install == ("python -m pip install -e . --no-deps --no-build-isolation",)
    tox = replace(issue.instance, eval_sh=issue.instance.eval_sh.replace("pytest -rA", "tox --current-env -epy39 -v --"))
    assert Native("").test(tox).test == "python -m pytest -rA tests/test_abacus.py"
    assert Image().test(tox).test == "tox --current-env -epy39 -v -- tests/test_abacus.py"
    [plain, fallback] = Native("").test(replace(issue.instance, repo="matplotlib/matplotlib")).install[0].split(" || ")
    assert plain in fallback
    assert "MPLSETUPCFG" in fallback
    with pytest.raises(TaskError, match="eval_sh does not show"):
        plan.script(replace(issue.instance, eval_sh="pytest"))


def test_without_a_script_the_official_table_is_asked(issue: Issue) -> None:
    sphinx = replace(issue.instance, repo="sphinx-doc/sphinx", version="7.2", eval_sh="")
    found = plan.script(sphinx)
    assert found.before == ("sed -i 's/pytest/pytest -rA/' tox.ini",)  # and not what asks the system for graphviz
    assert found.install == ("python -m pip install -e .[test]",)
    assert found.test == "tox --current-env -epy39 -v -- tests/test_abacus.py"
    django = plan.script(replace(issue.instance, repo="django/django", version="5.0", eval_sh=""))
    assert django.test.endswith("--parallel 1 test_abacus")
    assert plan.script(replace(issue.instance, eval_sh="")).test == "pytest -rA tests/test_abacus.py"  # nobody knows it


def test_pythons_are_found_and_missed() -> None:
    found = interpreters.find(PYTHON)
    assert ".".join(map(str, found.version)) == PYTHON
    assert found.program.exists()
    with pytest.raises(UsageError, match=r"no Python 3\.2 on this machine; install it with `uv python install 3\.2`"):
        interpreters.find("3.2.1")


def test_pythons_of_uv_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cpython-3.2.9-linux-x86_64-gnu" / "bin" / "python3.2"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '3.2.9\\n/opt/three\\n/opt/three/bin/python3.2\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path))
    found = interpreters.find("3.2")
    assert (found.version, found.prefix, found.in_system) == ((3, 2, 9), Path("/opt/three"), False)


@needs_data
@pytest.mark.parametrize("name", ["verified", "lite", "other"])
def test_commands_are_the_official_ones(name: str) -> None:
    """The data's own scripts and what is made of the table and the test patch agree on every instance."""
    for each in load(str(SHARED / f"{name}.jsonl.gz")):
        given, made = plan.script(each), plan.script(replace(each, eval_sh=""))
        assert given.test.split() == made.test.split(), each.id
        assert given.install[:1] == made.install, each.id
        assert plan.changed_files(each.patch)
        if each.environment_yml:
            assert plan.packages(each).python


def test_rows_without_a_version_need_no_table(row: Mapping[str, object]) -> None:
    assert plan.script(from_row({**row, "version": None}, "here")).before == ()
