"""The index: partial names, freshness after edits by anybody, imports both ways, the cache, and a repository that stays clean."""

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.errors import ToolError, UsageError
from palestra.tools.code import CodeIndex, Symbol
from palestra.tools.code.files import HostFiles
from palestra.tools.code.watch import Watch

SHOP = {
    "shop/__init__.py": "from .models import Order\n\nVERSION = '1'\n",
    "shop/models.py": (
        "from shop.prices import RATE, total\n\n\nclass Order:\n    limit = 3\n\n    def total(self):\n"
        '        """The total of all."""\n        return total(self.items) * RATE\n\n\nclass Big(Order):\n    pass\n'
    ),
    "shop/prices.py": "RATE: float = 1.2\n\n\ndef total(items):\n    # total of items\n    return sum(items)\n",
    "shop/views.py": (
        "from . import models\nimport shop.prices as p\n\n\ndef show(order):\n    return models.Order().total(), p.total([])\n"
    ),
    "README.md": "Call total on an Order.\n",
}

MakeIndex = Callable[[], CodeIndex]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    for path, text in SHOP.items():
        write(folder / path, text)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def names(symbols: list[Symbol]) -> list[str]:
    return [f"{each.path}:{each.start}-{each.end} {each.kind} {each.name}" for each in symbols]


def test_a_definition_is_found_by_any_end_of_its_name(root: Path, cache: Path) -> None:
    index = CodeIndex(root, cache)
    method = Symbol("shop/models.py", "Order.total", "method", 7, 9)
    function = Symbol("shop/prices.py", "total", "function", 4, 6)
    assert index.symbol("total") == [method, function]
    assert index.symbol("Order.total") == index.symbol("shop.models.Order.total") == index.symbol("Order::total()") == [method]
    assert index.symbol("prices.total") == [function]
    assert index.symbol("total", kind="method") == index.symbol("total", path="shop/models.py") == [method]
    assert index.symbol("total", path="shop") == [method, function]
    assert names(index.symbol("RATE")) == ["shop/prices.py:1-1 variable RATE"]
    assert names(index.symbol("Order.limit")) == ["shop/models.py:5-5 variable Order.limit"]


def test_an_absent_name_has_no_definition(root: Path, cache: Path) -> None:
    index = CodeIndex(root, cache)
    assert index.symbol("Total") == index.symbol("rder.total") == index.symbol("other.Order") == index.symbol("") == []
    assert index.symbol("total", path="sho") == index.references("nothing") == []
    assert index.closest("totl")[0].name in ("Order.total", "total")


def test_references_say_what_and_where(root: Path, cache: Path) -> None:
    index = CodeIndex(root, cache)
    assert [(each.path, each.line, each.use, each.scope) for each in index.references("total")] == [
        ("shop/models.py", 1, "import", ""),
        ("shop/models.py", 7, "definition", "Order.total"),
        ("shop/models.py", 9, "call", "Order.total"),
        ("shop/prices.py", 4, "definition", "total"),
        ("shop/views.py", 6, "call", "show"),
    ]
    assert names(index.subclasses("Order")) == ["shop/models.py:12-13 class Big"]
    assert [each.line for each in index.mentions("total") if each.path == "shop/prices.py"] == [4, 5]


def test_imports_go_both_ways(root: Path, cache: Path) -> None:
    outwards, inwards = CodeIndex(root, cache).dependencies("shop/prices.py")
    assert outwards == []
    assert [(each.path, each.line) for each in inwards] == [("shop/models.py", 1), ("shop/views.py", 2)]
    outwards, inwards = CodeIndex(root, cache).dependencies("shop/models.py")
    assert [(each.module, each.target) for each in outwards] == [("shop.prices", "shop/prices.py")]
    assert [(each.path, each.line) for each in inwards] == [("shop/__init__.py", 1), ("shop/views.py", 1)]


def test_an_outline_is_in_order(root: Path, cache: Path) -> None:
    index = CodeIndex(root, cache)
    assert [each.name for each in index.outline("shop/models.py")] == ["Order", "Order.limit", "Order.total", "Big"]
    with pytest.raises(ToolError, match=r"no source file 'models.py'; did you mean 'shop/models.py'"):
        index.outline("models.py")


def test_text_is_found_in_every_file(root: Path, cache: Path) -> None:
    found = CodeIndex(root, cache).text(r"\btotal\b.*Order")
    assert [(each.path, each.line) for each in found] == [("README.md", 1)]


def _no_watch(_: type[Watch]) -> None:
    return None


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "looked at one by one"])
def test_edits_by_anybody_show_in_the_next_answer(
    root: Path, cache: Path, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not watched:
        monkeypatch.setattr(Watch, "open", classmethod(_no_watch))
    index = CodeIndex(root, cache)
    assert index.symbol("fresh") == []
    with (root / "shop/prices.py").open("a", encoding="utf-8") as file:
        file.write("\ndef fresh(): pass\n")
        file.flush()
        assert names(index.symbol("fresh")) == ["shop/prices.py:8-8 function fresh"]
    assert [each.line for each in index.references("fresh")] == [8]

    subprocess.run(["sed", "-i", "s/fresh/stale/", str(root / "shop/prices.py")], check=True)
    assert index.symbol("fresh") == []
    assert names(index.symbol("stale")) == ["shop/prices.py:8-8 function stale"]

    write(root / "deep/er/new.py", "class Found:\n    pass\n")
    assert names(index.symbol("Found")) == ["deep/er/new.py:1-2 class Found"]
    write(root / "deep/er/other.py", "class Found: pass\n")
    assert len(index.symbol("Found")) == 2
    (root / "deep/er").rename(root / "deep/est")
    assert [each.path for each in index.symbol("Found")] == ["deep/est/new.py", "deep/est/other.py"]
    write(root / "deep/est/new.py", "class Lost: pass\n")
    assert [each.path for each in index.symbol("Found")] == ["deep/est/other.py"]
    shutil.rmtree(root / "deep")
    assert index.symbol("Found") == index.symbol("Lost") == []

    (root / "shop/prices.py").unlink()
    assert [each.path for each in index.symbol("total")] == ["shop/models.py"]
    write(root / "shop/prices.py", SHOP["shop/prices.py"])
    assert len(index.symbol("total")) == 2


def test_edits_of_the_same_size_in_the_same_moment_show(root: Path, cache: Path) -> None:
    index = CodeIndex(root, cache)
    path = root / "shop/quick.py"
    for number in range(100, 160):
        write(path, f"def quick_{number}(): pass\n")
        os.utime(path, ns=(1, 1))
        assert len(index.symbol(f"quick_{number}")) == 1
        assert index.symbol(f"quick_{number - 1}") == []


def test_two_indices_of_one_base_do_not_see_each_others_changes(root: Path, cache: Path, tmp_path: Path) -> None:
    shared = CodeIndex(root, cache)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    write(copy / "shop/prices.py", "def mine(): pass\n")
    other = shared.over(HostFiles(copy))
    assert names(other.symbol("mine")) == ["shop/prices.py:1-1 function mine"]
    assert [each.path for each in other.symbol("total")] == ["shop/models.py"]
    assert shared.symbol("mine") == []
    assert len(shared.symbol("total")) == 2


def test_the_repository_stays_clean(root: Path, cache: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [root, *root.rglob("*")]}

    before = state()
    index = CodeIndex(root, cache)
    index.symbol("total"), index.references("total"), index.text("total"), index.dependencies("shop/models.py")
    assert state() == before


def test_what_was_read_once_is_not_read_again(root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in root.rglob("*.py"):
        os.utime(path, ns=(10**18, 10**18))
    monkeypatch.setattr("palestra.tools.code.files.SETTLED", -1)  # the files are as old as they look
    CodeIndex(root, cache)
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)

    def refuse(*_: object) -> None:
        raise AssertionError("a content that is in the cache is not parsed again")

    monkeypatch.setattr("palestra.tools.code.base.read_record", refuse)
    assert len(CodeIndex(moved, cache).symbol("total")) == 2
    monkeypatch.setattr(HostFiles, "read", refuse)
    index = CodeIndex(root, cache)
    assert len(index.symbol("total")) == 2
    assert [each.module for each in index._imports("shop/views.py")] == [".", "shop.prices"]


@pytest.mark.parametrize("harm", ["no folder", "no database", "other columns"])
def test_a_cache_that_cannot_be_used_is_done_without(root: Path, cache: Path, harm: str) -> None:
    if harm == "no folder":
        write(cache, "a file")
    else:
        CodeIndex(root, cache)
        [database] = cache.glob("*.sqlite")
        if harm == "no database":
            database.write_bytes(b"nonsense" * 1000)
        else:
            with sqlite3.connect(database) as connection:
                connection.execute("UPDATE contents SET definitions = 'nonsense'")
                connection.execute("UPDATE trees SET files = 'nonsense'")
    assert len(CodeIndex(root, cache).symbol("total")) == 2


def test_links_and_hidden_folders_are_left_out(root: Path, cache: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside.py", "def secret(): pass\n")
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "folder").symlink_to(tmp_path)
    write(root / ".git/hooks/hook.py", "def secret(): pass\n")
    write(root / "node_modules/a/a.js", "function secret() {}\n")
    os.mkfifo(root / "pipe.py")
    index = CodeIndex(root, cache)
    assert index.symbol("secret") == []
    (root / "shop/views.py").unlink()
    (root / "shop/views.py").symlink_to(tmp_path / "outside.py")
    assert index.symbol("secret") == []
    assert [each.path for each in index.text("secret")] == []


def test_odd_files_are_read(root: Path, cache: Path) -> None:
    (root / "binary.py").write_bytes(b"\0\xff" * 100)
    (root / "bytes.py").write_bytes(b"x = '\xff\xfe'\ndef odd(): pass\n")
    (root / "empty.py").write_bytes(b"")
    (root / "mark.py").write_bytes(b"\xef\xbb\xbfdef marked(): pass\n")
    (root / "cookie.py").write_bytes(b"# coding: no-such-thing\ndef cookie(): pass\n")
    (root / "big.py").write_bytes(b"def big(): pass\n" + b"#" * 3_000_000)
    (root / os.fsdecode(b"na\xffme.py")).write_bytes(b"def badly_named(): pass\n")
    index = CodeIndex(root, cache)
    found = {name: len(index.symbol(name)) for name in ("odd", "marked", "cookie", "big", "badly_named")}
    assert found == {"odd": 1, "marked": 1, "cookie": 1, "big": 0, "badly_named": 1}
    assert index.outline("binary.py") == index.outline("empty.py") == []


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        CodeIndex(tmp_path / "nowhere")
