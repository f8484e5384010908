"""The shell tool. Each call is a bash of its own in the sandbox; what stays (folder, variables, functions) is handed on through
a file there, so that nothing has to run between calls and a call that is killed takes nothing with it.
"""

import secrets
from typing import Annotated

from pydantic import Field

from palestra.errors import ToolError
from palestra.protocols import Sandbox
from palestra.tools.output import as_text

MAX_COMMAND = 262_144
MAX_SECONDS = 600

# Programs that would wait for a key, or paint, do neither.
_ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb"}

# The command comes by stdin, since arguments end at 128 KB. It has an `eval` of its own, so that bash counts its lines from 1.
_START = 'eval "$1"; eval "$__palestra_command"; { __palestra_save $?; } > /dev/null 2>&1; exit "$__palestra_code"'
_PRELUDE = r"""
IFS= read -r -d '' __palestra_command
exec < /dev/null 2>&1
__palestra_state=${TMPDIR:-/tmp}/.palestra-shell-@TOKEN@
set --
__palestra_save() {
    set +eufvx
    __palestra_code=$1
    unset -f __palestra_save
    {
        while IFS= read -r __palestra_name; do
            case $__palestra_name in
            _ | __palestra_* | BASH | BASH_* | BASHOPTS | BASHPID | COMP_* | DIRSTACK | EPOCH* | EUID | FUNCNAME | GROUPS) ;;
            HISTCMD | LINENO | OLDPWD | PIPESTATUS | PPID | PWD | RANDOM | SECONDS | SHELLOPTS | SHLVL | SRANDOM | UID) ;;
            *) declare -p "$__palestra_name" ;;
            esac
        done <<< "$(compgen -v)"
        declare -f
        declare -F
        printf 'cd -- %q\nOLDPWD=%q\n' "$PWD" "$OLDPWD"
    } > "$__palestra_state.new"
    mv -f -- "$__palestra_state.new" "$__palestra_state"
}
[ -f "$__palestra_state" ] && source "$__palestra_state" > /dev/null 2>&1
trap '{ __palestra_save; } > /dev/null 2>&1' EXIT
"""


class Shell:
    def __init__(self, sandbox: Sandbox, folder: str, keep: int = 16_384) -> None:
        """Commands begin in `folder`; of the output of each, `keep` bytes are shown."""
        self._sandbox, self._folder, self._keep = sandbox, folder, keep
        self._prelude = _PRELUDE.replace("@TOKEN@", secrets.token_hex(8))

    async def bash(self, command: str, seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS)] = 60) -> str:
        """Run a command in bash. The working directory, variables and functions stay for the next call. There is no input to
        read from. Long output is shortened in its middle.

        Args:
            command: one or several lines of bash
            seconds: time limit; when it has passed, the command is killed
        """
        ran = await self._sandbox.run(
            ["bash", "-c", _START, "bash", self._prelude],
            folder=self._folder,
            environment=_ENVIRONMENT,
            stdin=_checked(command),
            seconds=seconds,
            keep=self._keep,
        )
        said = as_text(ran.stdout).rstrip("\n")
        if ran.timed_out:
            end = f"[killed after {seconds} s; folder, variables and functions are as they were before this command]"
        else:
            end = f"[exit code {ran.code}]"
        return f"{said}\n{end}" if said else end


def _checked(command: str) -> bytes:
    if not command.strip():
        raise ToolError("the command is empty")
    try:
        data = command.encode()
    except UnicodeEncodeError as error:
        raise ToolError(
            f"the command holds half of a surrogate pair at character {error.start}; write whole characters"
        ) from None
    if len(data) > MAX_COMMAND:
        raise ToolError(
            f"the command has {len(data):,} bytes, and {MAX_COMMAND:,} are the most; write long texts to files with create"
        )
    if b"\0" in data:
        raise ToolError(f"the command holds a NUL byte at byte {data.index(0)}, which no shell can read; use printf '\\0'")
    return data
