"""An instance made here: a small package with a defect in a bare repository, whose history also has the fix. Its fields are those
of SWE-bench, its environment is real, and it runs as the real ones do.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from palestra import sandboxes
from palestra.sandbox.bubblewrap import Bubblewrap
from palestra.swe.bench.instance import from_row
from palestra.swe.bench.runtime import Native
from palestra.swe.bench.task import Issue

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

SHARED = Path(__file__).parents[4] / "shared" / "data" / "swebench"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"SWE-bench's data is not at {SHARED}")

BROKEN = '''"""Numbers in a row."""


def mean(numbers):
    """The sum by the count; of nothing it is 0."""
    return sum(numbers) / len(numbers)


def largest(numbers):
    return max(numbers)
'''
FIXED = BROKEN.replace("return sum(numbers) / len(numbers)", "return sum(numbers) / len(numbers) if numbers else 0")
TESTS = """import abacus


def test_mean():
    assert abacus.mean([1, 2, 3]) == 2


def test_largest():
    assert abacus.largest([1, 3, 2]) == 3
"""
HIDDEN = f"{TESTS}\n\ndef test_mean_of_nothing():\n    assert abacus.mean([]) == 0\n"
SETUP = 'from setuptools import setup\nsetup(name="abacus", version="1.0", packages=["abacus"])\n'
PYTHON = ".".join(map(str, sys.version_info[:3]))
# Of these tabulate and termcolor the index has no wheel; of tabulate 0.8 it has later ones.
ENVIRONMENT = f"""name: testbed
dependencies:
  - libffi=3.4.4=h6a678d5_1
  - python={PYTHON}=he870216_1
  - setuptools=75.1.0=py39h06a4308_0
  - wheel=0.44.0=py39h06a4308_0
  - iniconfig=2.0.0=pyhd3eb1b0_0
  - tabulate=0.8.3=py39_0
  - termcolor=1.1.0=py39h06a4308_1
  - typing-extensions=4.12.2=py39h06a4308_0
  - typing_extensions=4.12.2=py39h06a4308_0
  - pip:
      - packaging==24.1
      - pluggy==1.5.0
      - pytest==8.3.3
prefix: /opt/miniconda3/envs/testbed
"""
EVALUATE = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
python -m pip install . --no-deps --no-build-isolation
git checkout {base} tests/test_abacus.py
git apply -v - <<'EOF_1'
export NOT_THIS=1
EOF_1
export ABACUS=1
: '>>>>> Start Test Output'
pytest -rA tests/test_abacus.py
: '>>>>> End Test Output'
git checkout {base} tests/test_abacus.py
"""


def git(folder: Path, *words: str) -> str:
    dates = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in WHO.items()}
    done = subprocess.run(["git", *words], cwd=folder, env={**os.environ, **dates}, check=True, capture_output=True, text=True)
    return done.stdout


WHO = {"NAME": "a", "EMAIL": "a@localhost", "DATE": "2020-01-01T00:00:00Z"}
"""Always the same, so that commits are, and snapshots are found again."""


@pytest.fixture(scope="session")
def mirrors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one bare repository of three commits: the base, a fix, and its tests."""
    work, folder = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("mirrors")
    git(work, "init", "-q", "-b", "main")
    for path, text in FILES.items():
        (work / path).parent.mkdir(exist_ok=True)
        (work / path).write_text(text)
    for path, text in (("", ""), ("abacus/__init__.py", FIXED), ("tests/test_abacus.py", HIDDEN)):
        if path:
            (work / path).write_text(text)
        git(work, "add", "-A")
        git(work, "commit", "-q", "-m", path or "base")
    git(work, "clone", "-q", "--bare", ".", str(folder / "maker__abacus"))
    return folder


# The attributes would have `git archive` leave the tests out.
FILES = {
    "abacus/__init__.py": BROKEN,
    "tests/test_abacus.py": TESTS,
    "setup.py": SETUP,
    ".gitattributes": "tests export-ignore\n",
    "run.sh": "#!/bin/sh\n",
}


@pytest.fixture(scope="session")
def row(mirrors: Path) -> Mapping[str, object]:
    bare = mirrors / "maker__abacus"
    tests, fix, base = git(bare, "rev-list", "main").split()
    return {
        "instance_id": "maker__abacus-1",
        "repo": "maker/abacus",
        "base_commit": base,
        "version": "1.0",
        "problem_statement": "mean([]) raises ZeroDivisionError. It should be 0.",
        "patch": git(bare, "diff", base, fix),
        "test_patch": git(bare, "diff", fix, tests),
        "FAIL_TO_PASS": ["tests/test_abacus.py::test_mean_of_nothing"],
        "PASS_TO_PASS": ["tests/test_abacus.py::test_mean", "tests/test_abacus.py::test_largest"],
        "environment_yml": ENVIRONMENT,
        "eval_sh": EVALUATE.format(base=base),
        "log_parser": "parse_log_pytest",
    }


@pytest.fixture(scope="session")
def issue(row: Mapping[str, object], mirrors: Path) -> Issue:
    instance = from_row(row, "here")
    return Issue(instance.id, instance, Native(str(mirrors)))


@pytest.fixture
async def provider() -> AsyncIterator[None]:
    async with sandboxes.provided(Bubblewrap):
        yield
