"""Code search as an agent's tools: budgets with true counts, absent names, bad input, and a repository inside a sandbox."""

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tools.code.test_index import SHOP, write

from palestra.errors import ToolError
from palestra.message import ToolCall
from palestra.protocols import Ran
from palestra.sandbox.local import LocalSandbox
from palestra.tool import Tool, Toolbox
from palestra.tools.code import CodeIndex, CodeSearch

BUDGET = 1_500


@pytest.fixture
def index(tmp_path: Path) -> CodeIndex:
    for path, text in SHOP.items():
        write(tmp_path / "shop" / path, text)
    for number in range(80):
        write(tmp_path / "shop" / f"tests/test_{number}.py", f"def common():\n    total({number})\n")
    return CodeIndex(tmp_path / "shop", tmp_path / "cache")


@pytest.fixture
def search(index: CodeIndex) -> CodeSearch:
    return CodeSearch(index, budget=BUDGET)


def test_every_method_is_a_tool(search: CodeSearch) -> None:
    tools = [Tool.of(function) for function in search.tools()]
    assert [tool.name for tool in tools] == [
        "search_symbol",
        "find_references",
        "file_outline",
        "search_text",
        "get_dependencies",
    ]
    for tool in tools:
        assert tool.description
        assert all("description" in each for each in tool.parameters["properties"].values())


async def test_one_definition_comes_with_its_code(search: CodeSearch) -> None:
    answer = await search.search_symbol("Order.total")
    assert answer.startswith("1 definition of 'Order.total': shop/models.py:7-9 method Order.total\n7     def total(self):\n")
    assert "9         return total(self.items) * RATE" in answer
    assert "1 direct subclass:\nshop/models.py:12-13 class Big" in await search.search_symbol("Order")


async def test_a_long_class_comes_with_its_members(search: CodeSearch, index: CodeIndex) -> None:
    methods = "".join(f"    def method_{number}(self):\n        return {number}\n" for number in range(60))
    write(index.root / "long.py", f"class Long:\n{methods}")
    answer = await search.search_symbol("Long")
    assert "60 definitions in it:\n  2-3 method method_0\n" in answer
    assert len(answer) <= BUDGET * 1.1


async def test_the_budget_never_hides_the_count(search: CodeSearch) -> None:
    for answer, count in (
        (await search.search_symbol("common"), "80 definitions of 'common'"),
        (await search.find_references("total"), "85 references to 'total' (2 definition, 82 call, 1 import)"),
        (await search.search_text("total"), "88 lines matching 'total' in 84 files"),
    ):
        assert answer.startswith(count)
        assert len(answer) <= BUDGET + 100
        shown = len(re.findall(r"^\S+\.\w+:\d+", answer, re.MULTILINE))
        [left] = re.findall(r"^… (\d+) more$", answer, re.MULTILINE)
        assert shown + int(left) == int(count.split()[0])


async def test_code_comes_before_tests(search: CodeSearch) -> None:
    lines = (await search.find_references("total")).splitlines()
    assert lines[1].startswith("shop/models.py:7 definition in Order.total: def total")
    assert lines[3].startswith("shop/models.py:9 call in Order.total: return total")


async def test_an_absent_name_gets_the_closest_and_the_lines_that_mention_it(search: CodeSearch) -> None:
    answer = await search.search_symbol("Ordr")
    assert answer.startswith(
        "No definition of 'Ordr' (84 source files searched).\nClosest names:\nshop/models.py:4-9 class Order"
    )
    answer = await search.search_symbol("items")
    assert answer.startswith("No definition of 'items'")
    assert "4 lines mentioning 'items' in 2 files:" in answer
    answer = await search.search_symbol("total", kind="class")
    assert answer.startswith("No class of 'total'")
    assert "shop/prices.py:4-6 function total" in answer
    assert "search_text" in await search.search_symbol("qqqqqqq")
    assert (await search.find_references("nobody")).startswith("No definition of 'nobody'")
    assert (await search.search_text("qqqqqqq")).startswith("No line matching 'qqqqqqq'")


async def test_outline_and_dependencies(search: CodeSearch) -> None:
    assert await search.file_outline("shop/models.py") == (
        "shop/models.py: 4 definitions\n4-9 class Order\n  5-5 variable limit\n  7-9 method total\n12-13 class Big"
    )
    answer = await search.get_dependencies("./shop/../shop/models.py")
    assert "imports 1 time from this repository:\n  line 1: shop.prices -> shop/prices.py" in answer
    assert "2 files import it:\n  shop/__init__.py:1: .models\n  shop/views.py:1: ." in answer


BAD = [
    ("search_symbol", {"name": "a\0b"}, "NUL"),
    ("search_symbol", {"name": "a" * 10_000}, "10000 characters"),
    ("search_symbol", {"name": "a", "path": "../.."}, "outside the repository"),
    ("search_symbol", {"name": "a", "kind": "thing"}, "kind"),
    ("find_references", {"name": "a", "path": "/etc"}, "outside the repository"),
    ("file_outline", {"path": "/etc/passwd"}, "outside the repository"),
    ("file_outline", {"path": "shop/\0.py"}, "NUL"),
    ("file_outline", {"path": "shop/modles.py"}, "did you mean 'shop/models.py'"),
    ("file_outline", {"path": ""}, "no source file"),
    ("search_text", {"pattern": "(a"}, "unclosed group"),
    ("search_text", {"pattern": "a\0"}, "NUL"),
    ("search_text", {"pattern": ""}, "empty"),
    ("search_text", {"pattern": "a" * 100_000}, "100000 characters"),
    ("search_text", {"pattern": "a", "path": "../../etc"}, "outside the repository"),
    ("search_text", {"pattern": "a{1000}{1000}{1000}"}, "cannot be searched for"),
    ("search_text", {"pattern": "a", "path": "no/such/folder"}, "No such file"),
    ("get_dependencies", {"path": "README.md"}, "no source file"),
]


@pytest.mark.parametrize(("tool", "arguments", "complaint"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_input_is_told(search: CodeSearch, tool: str, arguments: dict[str, str], complaint: str) -> None:
    with pytest.raises(ToolError) as told:
        await Toolbox(search.tools()).run(ToolCall("1", tool, arguments))
    assert complaint in str(told.value)
    assert len(str(told.value)) < 2_000


async def test_no_pattern_hangs(search: CodeSearch, index: CodeIndex) -> None:
    write(index.root / "long.txt", "a" * 100_000 + "\n")
    answer = await asyncio.wait_for(search.search_text("(a+)+(a*)*b|(x+x+)+y"), 30)
    assert answer.startswith("No line")


async def test_a_pattern_is_no_option(search: CodeSearch, index: CodeIndex) -> None:
    write(index.root / "options.txt", "--files\n")
    assert (await search.search_text("--files")).startswith("1 line matching '--files' in 1 file:\noptions.txt:1: --files")


class Counted(LocalSandbox):
    """A sandbox that counts what it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.commands = 0
        self.reads: list[str] = []

    async def run(self, command: Sequence[str], **options: Any) -> Ran:
        self.commands += 1
        return await super().run(command, **options)

    async def read(self, path: str, limit: int = 16_777_216) -> bytes:
        self.reads.append(path.removeprefix(f"{self.folder}/"))
        return await super().read(path, limit)


@pytest.fixture
def sandbox(index: CodeIndex, tmp_path: Path) -> Counted:
    shutil.copytree(index.root, tmp_path / "box")  # with the files' times, as a snapshot has them
    return Counted(tmp_path / "box")


async def test_a_question_in_a_sandbox_is_one_command(index: CodeIndex, sandbox: Counted) -> None:
    await asyncio.sleep(0.1)  # until the copy's times are settled
    search = CodeSearch.in_sandbox(sandbox, sandbox.folder, index)
    assert (await search.search_symbol("Order.total")).startswith("1 definition")
    assert (await search.find_references("total")).startswith("85 references")
    assert (await search.search_text(r"\btotal\b")).startswith("88 lines")
    assert (sandbox.commands, sandbox.reads) == (3, [])


async def test_edits_in_a_sandbox_show_there_alone(index: CodeIndex, sandbox: Counted) -> None:
    await asyncio.sleep(0.1)
    search, outside = CodeSearch.in_sandbox(sandbox, sandbox.folder, index), CodeSearch(index)
    await sandbox.run(["sed", "-i", "s/def total/def whole/", "shop/prices.py"])
    await sandbox.run(["rm", "tests/test_7.py"])
    await sandbox.write(f"{sandbox.folder}/new.go", b"package m\nfunc Fresh() {}\n")
    assert "shop/prices.py:4-6 function whole\n4 def whole(items):" in await search.search_symbol("whole")
    assert (await search.search_symbol("common")).startswith("79 definitions")
    assert "new.go:2-2 function Fresh" in await search.search_symbol("Fresh")
    assert (await search.search_text("Fresh")).startswith("1 line")
    assert sorted(set(sandbox.reads)) == ["new.go", "shop/prices.py"]
    assert "shop/prices.py:4-6 function total" in await outside.search_symbol("total")
    assert (await outside.search_symbol("Fresh")).startswith("No definition")


async def test_a_sandbox_without_a_snapshot_is_read_once(sandbox: Counted) -> None:
    await asyncio.sleep(0.1)
    search = CodeSearch.in_sandbox(sandbox, sandbox.folder)
    for _ in range(2):
        assert (await search.search_symbol("Order.total")).startswith("1 definition")
    assert (await search.find_references("total")).startswith("85 references")
    assert (sandbox.commands, len(sandbox.reads)) == (3, 84)


async def test_a_time_that_was_set_back_hides_no_edit(index: CodeIndex, sandbox: Counted) -> None:
    await asyncio.sleep(0.1)
    search = CodeSearch.in_sandbox(sandbox, sandbox.folder, index)
    script = (
        "touch -r shop/prices.py /tmp/$$ && sed -i s/total/whole/ shop/prices.py && touch -r /tmp/$$ shop/prices.py; rm /tmp/$$"
    )
    await sandbox.run(["sh", "-c", script])
    assert (await search.search_symbol("whole")).startswith("1 definition")


async def test_bad_input_in_a_sandbox_is_told(index: CodeIndex, sandbox: Counted) -> None:
    search = CodeSearch.in_sandbox(sandbox, sandbox.folder, index)
    for call in (search.search_text("(a"), search.search_text("a", path="../etc"), search.file_outline("/etc/passwd")):
        with pytest.raises(ToolError):
            await call
    assert ": 4 definitions" in await search.file_outline(f"{sandbox.folder}/shop/models.py")
