"""The editor: exact changes, what a failed one shows, taking back, and paths and files that it refuses."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from palestra.errors import ToolError
from palestra.sandbox.local import LocalSandbox
from palestra.tool import Tool
from palestra.tools.edit import MAX_FILE, MAX_VIEW, Editor

CODE = "import os\n\n\ndef one(a):\n    return a + 1\n\n\ndef two(a):\n    b = a\n    return b + 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    return folder


@pytest.fixture
def editor(folder: Path) -> Editor:
    return Editor(LocalSandbox(folder), str(folder))


async def refused(call: object) -> str:
    with pytest.raises(ToolError) as caught:
        await call  # type: ignore[misc]
    return str(caught.value)


# view


async def test_view_numbers_lines(editor: Editor, folder: Path) -> None:
    whole = await editor.view("code.py")
    assert whole.splitlines()[3] == "     4\tdef one(a):"
    assert len(whole.splitlines()) == 10
    assert (
        await editor.view(str(folder / "code.py"), 4, 5) == "     4\tdef one(a):\n     5\t    return a + 1\n[lines 4 to 5 of 10]"
    )
    assert (await editor.view("code.py", 9, 99)).endswith("[lines 9 to 10 of 10]")


async def test_view_of_a_long_file_goes_on_where_it_stopped(editor: Editor, folder: Path) -> None:
    (folder / "long").write_text("".join(f"line {n} {'x' * 50}\n" for n in range(1, 3001)))
    seen, start = [], 1
    while True:
        text = await editor.view("long", start)
        assert len(text) <= MAX_VIEW + 200
        *lines, note = text.splitlines()
        seen += lines if "go on" in note else [*lines, note]
        if "go on" not in note:
            break
        start = int(note.rpartition("= ")[2].rstrip("]"))
    shown = [line.partition("\t")[2] for line in seen if "\t" in line]
    assert [line.split()[1] for line in shown] == [str(n) for n in range(1, 3001)]


async def test_view_cuts_endless_lines(editor: Editor, folder: Path) -> None:
    (folder / "minified.js").write_text("x" * 1_000_000)
    assert (await editor.view("minified.js")) == "     1\t" + "x" * 400 + "[… 999,600 more characters]"


async def test_view_of_an_empty_file_and_of_wrong_ranges(editor: Editor, folder: Path) -> None:
    (folder / "empty").write_text("")
    assert await editor.view("empty") == "[the file is empty]"
    assert await refused(editor.view("code.py", 11)) == "start = 11: code.py has 10 lines"
    assert await refused(editor.view("code.py", 5, 4)) == "end = 4 stands before start = 5"


# edit


async def test_edit_replaces_and_shows_the_place(editor: Editor, folder: Path) -> None:
    said = await editor.edit("code.py", "    return a + 1\n", "    c = a\n    return c + 1\n")
    assert (folder / "code.py").read_text() == CODE.replace("    return a + 1\n", "    c = a\n    return c + 1\n")
    assert "     5\t    c = a\n     6\t    return c + 1\n" in said


async def test_a_failed_edit_shows_the_nearest_lines(editor: Editor, folder: Path) -> None:
    said = await refused(editor.edit("code.py", "def two(x):\n    b = a\n    return b + 3", "…"))
    assert said.startswith("old is not in code.py. These lines are nearest:")
    assert "     8\tdef two(a):\n     9\t    b = a\n    10\t    return b + 2" in said
    one = await refused(editor.edit("code.py", "    return a + 11", "…"))
    assert "     5\t    return a + 1" in one
    assert (folder / "code.py").read_text() == CODE


async def test_a_difference_in_white_space_is_named(editor: Editor) -> None:
    said = await refused(editor.edit("code.py", "def two(a):\n  b = a\n  return b + 2", "…"))
    assert "differ only in white space:\n" in said
    assert "     9\t    b = a" in said


async def test_nothing_alike_is_said_too(editor: Editor) -> None:
    assert "Nothing in it is like it" in await refused(editor.edit("code.py", "SELECT everything", "…"))


async def test_several_matches_are_listed(editor: Editor, folder: Path) -> None:
    assert "2 times, at lines 4, 8;" in await refused(editor.edit("code.py", "(a):", "(b):"))
    (folder / "many").write_text("same\n" * 5000)
    assert "1000 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, …;" in await refused(editor.edit("many", "same", "other"))
    (folder / "overlap").write_text("aaa")
    assert "2 times" in await refused(editor.edit("overlap", "aa", "b"))


async def test_edits_that_say_nothing(editor: Editor) -> None:
    assert "old is empty" in await refused(editor.edit("code.py", "", "x"))
    assert "are the same" in await refused(editor.edit("code.py", "os", "os"))


async def test_line_ends_and_stray_bytes_stay(editor: Editor, folder: Path) -> None:
    (folder / "dos").write_bytes(b"one\r\ntwo\r\nthr\xe9e\r\n")
    await editor.edit("dos", "one\ntwo", "1\n2\n2b")
    assert (folder / "dos").read_bytes() == b"1\r\n2\r\n2b\r\nthr\xe9e\r\n"
    assert "thr\ufffde" in await editor.view("dos")
    (folder / "mixed").write_bytes(b"one\r\ntwo\nthree\n")
    await editor.edit("mixed", "two\nthree", "2\n3")
    assert (folder / "mixed").read_bytes() == b"one\r\n2\n3\n"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_an_edit_changes_exactly_what_it_names(editor: Editor, folder: Path, data: st.DataObject) -> None:
    body = data.draw(st.text(alphabet="ab\n\r ü", max_size=30)).encode() + data.draw(st.sampled_from([b"", b"\xff", b"\r\n"]))
    (folder / "file").write_bytes(body)
    old, new = data.draw(st.text(alphabet="ab\n ü", min_size=1, max_size=4)), data.draw(st.text(alphabet="ab\nü", max_size=4))
    try:
        await editor.edit("file", old, new)
    except ToolError:
        assert (folder / "file").read_bytes() == body
        return
    after = (folder / "file").read_bytes()
    ways = [(old.encode(), new.encode()), (old.replace("\n", "\r\n").encode(), new.replace("\n", "\r\n").encode())]
    assert any(body.count(was) >= 1 and body.replace(was, now, 1) == after for was, now in ways)
    await editor.undo("file")
    assert (folder / "file").read_bytes() == body


# create and undo


async def test_create_writes_new_files_only(editor: Editor, folder: Path) -> None:
    assert await editor.create("new/deep/file.txt", "höi\n") == "new/deep/file.txt is written: 5 bytes."
    assert (folder / "new/deep/file.txt").read_text() == "höi\n"
    assert "exists already" in await refused(editor.create("code.py", "x"))
    await editor.create("code.py", "x", overwrite=True)
    assert (folder / "code.py").read_text() == "x"


async def test_undo_takes_back_change_by_change(editor: Editor, folder: Path) -> None:
    await editor.create("new.py", "a = 1\n")
    await editor.edit("new.py", "1", "2")
    await editor.edit("code.py", "import os", "import sys")
    await editor.edit("new.py", "2", "3")
    for content in ("a = 2\n", "a = 1\n"):
        assert await editor.undo("new.py") == "new.py is as it was before."
        assert (folder / "new.py").read_text() == content
    assert await editor.undo("new.py") == "new.py does not exist any more."
    assert not (folder / "new.py").exists()
    assert "no edit or create" in await refused(editor.undo("new.py"))
    await editor.undo("code.py")
    assert (folder / "code.py").read_text() == CODE


async def test_undo_never_destroys_what_others_wrote(editor: Editor, folder: Path) -> None:
    await editor.edit("code.py", "import os", "import sys")
    (folder / "code.py").write_text("written by a command")
    assert "changed otherwise" in await refused(editor.undo("code.py"))
    assert (folder / "code.py").read_text() == "written by a command"


# What is refused


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../outside", "..", "", "a\0b", "\ud800", "x" * 5000])
async def test_paths_that_lead_out_or_nowhere(editor: Editor, folder: Path, path: str) -> None:
    (folder.parent / "outside").write_text("secret")
    for call in (editor.view(path), editor.edit(path, "a", "b"), editor.create(path, "x", True), editor.undo(path)):
        said = await refused(call)
        assert "is outside" in said or "is no path" in said
        said.encode()
    assert (folder.parent / "outside").read_text() == "secret"


async def test_a_neighbour_with_a_longer_name_is_outside(editor: Editor, folder: Path) -> None:
    folder.with_name("work-2").mkdir()
    assert "is outside" in await refused(editor.create("../work-2/file", "x"))


async def test_what_is_no_text_file(editor: Editor, folder: Path) -> None:
    (folder / "binary").write_bytes(b"\x7fELF\0\1")
    (folder / "huge").write_bytes(b"x\n" * MAX_FILE)
    (folder / "sub").mkdir()
    for name, complaint in (
        ("binary", "binary file of 6 bytes"),
        ("huge", "are the most"),
        ("sub", "not a regular file"),
        ("absent", "No such file"),
    ):
        assert complaint in await refused(editor.view(name))
        assert complaint in await refused(editor.edit(name, "x", "y"))
    await refused(editor.create("sub", "x", overwrite=True))
    await refused(editor.create("code.py/below", "x"))


async def test_texts_that_are_none(editor: Editor, folder: Path) -> None:
    assert "NUL byte" in await refused(editor.create("new", "a\0b"))
    assert "surrogate" in await refused(editor.create("new", "\udc80"))
    assert "NUL byte" in await refused(editor.edit("code.py", "os", "\0"))
    assert "surrogate" in await refused(editor.edit("code.py", "os", "\ud800"))
    assert "are the most" in await refused(editor.create("new", "x" * (MAX_FILE + 1)))
    assert not (folder / "new").exists()
    assert (folder / "code.py").read_text() == CODE


def test_the_model_reads_of_every_argument(editor: Editor) -> None:
    for function in (editor.view, editor.edit, editor.create, editor.undo):
        properties = Tool.of(function).parameters["properties"]
        assert all(argument.get("description") for argument in properties.values())
