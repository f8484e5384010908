"""The shell tool: what stays between calls, what is told, and what no input can do to it."""

from pathlib import Path

import pytest

from palestra.errors import ToolError
from palestra.message import ToolCall
from palestra.sandbox.local import LocalSandbox
from palestra.tool import Tool, Toolbox
from palestra.tools.shell import MAX_COMMAND, Shell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def shell(folder: Path) -> Shell:
    return Shell(LocalSandbox(folder), str(folder))


async def test_output_and_exit_code_are_told(shell: Shell) -> None:
    assert await shell.bash("echo one; echo two >&2; echo three") == "one\ntwo\nthree\n[exit code 0]"
    assert await shell.bash("false") == "[exit code 1]"
    assert await shell.bash("echo no; exit 3") == "no\n[exit code 3]"
    assert await shell.bash("kill -9 $$") == "[exit code 137]"


# What stays


async def test_the_folder_stays(shell: Shell, folder: Path) -> None:
    await shell.bash("mkdir -p 'a b/c' && cd 'a b/c'")
    assert await shell.bash("pwd") == f"{folder}/a b/c\n[exit code 0]"
    await shell.bash("cd ..; false")
    assert await shell.bash("pwd; cd - >/dev/null; pwd") == f"{folder}/a b\n{folder}/a b/c\n[exit code 0]"


async def test_a_folder_that_is_gone_is_left(shell: Shell, folder: Path) -> None:
    await shell.bash("mkdir gone; cd gone; rmdir ../gone")
    assert await shell.bash("pwd") == f"{folder}\n[exit code 0]"


async def test_variables_stay_of_every_kind(shell: Shell) -> None:
    await shell.bash(
        """plain='a "b" $c
`d`'; export shown=yes; list=(1 'two words'); declare -A map=([k]='v v'); declare -i number=4; readonly fixed=1; name=my; IFS=:"""
    )
    said = await shell.bash(
        "echo \"$plain|$shown|${list[1]}|${map[k]}|$fixed|$name|$IFS\"; number+=3; echo $number; bash -c 'echo $shown$plain'"
    )
    assert said == 'a "b" $c\n`d`|yes|two words|v v|1|my|:\n7\nyes\n[exit code 0]'


async def test_functions_stay_and_exported_ones_stay_exported(shell: Shell) -> None:
    await shell.bash('greet() {\n  echo "hi $1"\n}\nloud() { echo LOUD; }\nexport -f loud')
    assert await shell.bash("greet you; bash -c loud; bash -c greet") == (
        "hi you\nLOUD\nbash: line 1: greet: command not found\n[exit code 127]"
    )


async def test_what_stays_survives_exit_errexit_and_traps(shell: Shell) -> None:
    assert (await shell.bash("a=1; exit 5")).endswith("[exit code 5]")
    assert (await shell.bash("set -euo pipefail; b=2; false; b=3")).endswith("[exit code 1]")
    assert await shell.bash("trap 'echo bye' EXIT; c=3") == "bye\n[exit code 0]"
    assert await shell.bash("echo $a$b$c; false; echo [$nothing]") == "123\n[]\n[exit code 0]"


async def test_tracing_shows_only_the_command(shell: Shell) -> None:
    assert await shell.bash("set -x; echo a") == "++ echo a\na\n[exit code 0]"
    assert await shell.bash("echo b") == "b\n[exit code 0]"


async def test_nothing_of_its_own_is_in_the_way(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PALESTRA_CACHE", raising=False)  # the user's, not the shell's
    await shell.bash("true")
    assert await shell.bash("echo $#; declare -F; env | grep -i palestra") == "0\ndeclare -f __palestra_save\n[exit code 1]"


async def test_random_numbers_are_not_the_same_in_every_call(shell: Shell) -> None:
    assert len({await shell.bash("echo $RANDOM$RANDOM") for _ in range(3)}) == 3


async def test_two_shells_share_nothing(folder: Path) -> None:
    one, other = (Shell(LocalSandbox(folder), str(folder)) for _ in range(2))
    await one.bash("x=1; cd /")
    assert await other.bash("echo [$x] $PWD") == f"[] {folder}\n[exit code 0]"


# Limits


async def test_a_command_that_takes_too_long_is_killed_and_changes_no_shell(shell: Shell) -> None:
    await shell.bash("x=before")
    said = await shell.bash("x=after; cd /; echo started; sleep 60 & sleep 60", seconds=1)
    assert said == "started\n[killed after 1 s; folder, variables and functions are as they were before this command]"
    assert (await shell.bash("echo $x")) == "before\n[exit code 0]"


async def test_long_output_keeps_beginning_and_end_and_the_true_size(folder: Path) -> None:
    shell = Shell(LocalSandbox(folder), str(folder), keep=40)
    assert (
        await shell.bash("seq 100000")
        == "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n[… 588,855 of 588,895 bytes left out …]\n99998\n99999\n100000\n[exit code 0]"
    )


async def test_a_gigabyte_of_output(shell: Shell) -> None:
    said = await shell.bash("head -c 1073741824 /dev/zero", seconds=120)
    assert f"of {2**30:,} bytes left out" in said
    assert len(said) < 20_000


async def test_characters_are_not_cut_in_two(folder: Path) -> None:
    shell = Shell(LocalSandbox(folder), str(folder), keep=21)
    said = await shell.bash("printf 'ü€😀%.0s' {1..9999}")
    assert "\ufffd" not in said
    assert said.startswith("ü€😀\n[…")
    assert said.endswith("]\nü€😀\n[exit code 0]") or said.endswith("😀\n[exit code 0]")


async def test_output_that_is_no_utf8(shell: Shell) -> None:
    said = await shell.bash(r"printf 'a\xffb\n'")
    assert said == "a\ufffdb\n[bytes that are no UTF-8 are shown as \ufffd]\n[exit code 0]"
    said.encode()  # it can go anywhere
    (await shell.bash("head -c 100000 /dev/urandom")).encode()


async def test_there_is_no_input_to_wait_for(shell: Shell) -> None:
    assert await shell.bash("cat; read x; echo [$x]") == "[]\n[exit code 0]"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("echo a\0b", "NUL byte at byte 6"),
        ("echo \ud800", "half of a surrogate pair"),
        ("#" + "x" * 10_000_000, "10,000,001 bytes, and 262,144 are the most"),
    ],
    ids=["empty", "blank", "nul", "surrogate", "10 MB"],
)
async def test_what_no_shell_could_run_is_said_to_the_model(shell: Shell, command: str, complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        await shell.bash(command)


async def test_a_command_of_the_largest_size_runs(shell: Shell) -> None:
    rest = "echo end"
    assert await shell.bash("#" + "x" * (MAX_COMMAND - len(rest) - 2) + "\n" + rest) == "end\n[exit code 0]"


async def test_broken_syntax_is_told_with_the_commands_own_line(shell: Shell) -> None:
    said = await shell.bash("echo 1\nnosuch\nif then")
    assert "line 3: syntax error" in said
    assert "line 2: nosuch: command not found" in await shell.bash("echo 1\nnosuch\n")


async def test_the_limit_is_part_of_the_schema(shell: Shell) -> None:
    seconds = Tool.of(shell.bash).parameters["properties"]["seconds"]
    assert (seconds["minimum"], seconds["maximum"], seconds["default"]) == (1, 600, 60)
    with pytest.raises(ToolError, match="less than or equal to 600"):
        await Toolbox([shell.bash]).run(ToolCall("c", "bash", {"command": "true", "seconds": 601}))


async def test_more_than_can_stay_is_said(shell: Shell) -> None:
    await shell.bash("x=before")
    said = await shell.bash("x=after; big=$(head -c 300000 /dev/zero | tr '\\0' a)")
    assert said == "[exit code 0] [variables and functions are more than 262,144 bytes, so this command's were not kept]"
    assert await shell.bash("echo $x") == "before\n[exit code 0]"


async def test_killing_by_name_does_not_hit_the_shell_itself(shell: Shell) -> None:
    await shell.bash("server() { sleep 60; }; name=server-of-mine")
    assert await shell.bash("pkill -f server-of-mine; echo still here") == "still here\n[exit code 0]"


async def test_nothing_is_left_in_the_folder(shell: Shell, folder: Path) -> None:
    await shell.bash("x=1")
    assert await shell.bash("ls -A") == "[exit code 0]"
