"""An agent's diff: what may be changed is taken, the rest left out, and what is no plain change refused."""

import subprocess
from pathlib import Path

import pytest

from palestra.swe.diff import LARGEST, Refused, admitted
from palestra.swe.grading import python_in

ALLOWED = python_in("pkg")


def diff_of(folder: Path, *commands: str) -> str:
    """A real diff: a repository, and what these commands change in it."""
    begin = "git init -q && mkdir -p pkg/tests && echo 'a = 1' > pkg/code.py && echo 'b = 1' > pkg/more.py"
    begin += " && touch pkg/tests/test_a.py"
    commit = "git add -A && git -c user.name=a -c user.email=a@b commit -qm base"
    take = "git add -A && git diff --cached --no-renames --full-index HEAD"
    script = "; ".join(commands)
    done = subprocess.run(["bash", "-ec", f"{begin}; {commit}; {script}; {take}"], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode()


def test_a_plain_change_is_taken_as_it_is(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, "echo 'a = 2' > pkg/code.py", "echo 'c = 3' > pkg/new.py", "rm pkg/more.py")
    assert admitted(diff, ALLOWED) == (diff, 0)


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/conftest.py",
        "pkg/tests/test_a.py",
        "pkg/test_b.py",
        "pkg/sitecustomize.py",
        "json.py",
        "pytest.ini",
        "pkg/data.json",
        "pkg/code.pyc",
        "PKG/code.py",
        "other/code.py",
        "pkg/cöde.py",
        "pkg/with space.py",
    ],
)
def test_other_files_are_left_out(tmp_path: Path, path: str) -> None:
    diff = diff_of(tmp_path, "echo 'a = 2' > pkg/code.py", f"mkdir -p \"$(dirname '{path}')\"", f"echo x = 1 > '{path}'")
    taken, left_out = admitted(diff, ALLOWED)
    assert (taken.count("diff --git"), left_out) == (1, 1)
    assert path not in taken


@pytest.mark.parametrize(
    "command",
    [
        "chmod +x pkg/code.py",
        "rm pkg/code.py; ln -s /etc/passwd pkg/code.py",
        "ln -s more.py pkg/link.py",
        "printf 'a\\0b' > pkg/code.py",
        "echo 1 > pkg/new.py; echo 2 > pkg/NEW.py",
    ],
)
def test_what_is_no_plain_change_is_refused(tmp_path: Path, command: str) -> None:
    with pytest.raises(Refused):
        admitted(diff_of(tmp_path, command), ALLOWED)


PLAIN = """diff --git a/pkg/code.py b/pkg/code.py
index 1337a53..e2a0a4d 100644
--- a/pkg/code.py
+++ b/pkg/code.py
@@ -1 +1 @@
-a = 1
+a = 2
"""


@pytest.mark.parametrize(
    "diff",
    [
        PLAIN.replace("+++ b/pkg/code.py", "+++ b/conftest.py"),
        PLAIN.replace("--- a/pkg/code.py", "--- a/../../etc/passwd"),
        PLAIN.replace("index", "rename from conftest.py\nrename to pkg/code.py\nindex"),
        PLAIN.replace("index 1337a53..e2a0a4d 100644", "old mode 100644\nnew mode 120000"),
        PLAIN + PLAIN,
        "--- a/pkg/code.py\n" + PLAIN,
        PLAIN + "x" * LARGEST,
    ],
)
def test_a_forged_diff_is_refused(diff: str) -> None:
    assert admitted(PLAIN, ALLOWED) == (PLAIN, 0)
    with pytest.raises(Refused):
        admitted(diff, ALLOWED)


@pytest.mark.parametrize("path", ["../pkg/code.py", "pkg/../conftest.py", "pkg/.git/hooks/x.py", "/pkg/code.py", "pkg//code.py"])
def test_a_name_that_leads_elsewhere_is_not_taken(path: str) -> None:
    assert admitted(PLAIN.replace("pkg/code.py", path), lambda _: True) == ("", 1)
