"""The shell tool. Each call is a bash of its own in the sandbox; what stays (folder, variables, functions) is written by one and
given to the next. So nothing has to run or lie in the sandbox between calls, and a call that is killed changes nothing.
"""

from typing import Annotated

from pydantic import Field

from palestra.errors import ToolError
from palestra.protocols import Sandbox
from palestra.tools.output import as_text, within

MAX_COMMAND = 262_144
MAX_STATE = 262_144
MAX_SECONDS = 600

# Programs that would wait for a key, or paint, do neither.
_ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "TERM": "dumb"}

# All comes by stdin: arguments end at 128 KB, and `pkill -f` reads them. The command has its own `eval`, so its lines begin at 1.
_START = (
    'IFS= read -r -d "" __palestra_command; eval "$(cat)"; eval "$__palestra_command"; '
    '{ __palestra_save $?; } 2> /dev/null; exit "$__palestra_code"'
)
# Output and errors become one stream, and the other one carries what stays.
_PRELUDE = rb"""
exec {__palestra_state}>&2 2>&1 < /dev/null
__palestra_save() {
    set +eufvx
    __palestra_code=$1
    unset -f __palestra_save
    {
        printf '# state\n'
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
    } >&"$__palestra_state"
}
trap '{ __palestra_save; } 2> /dev/null' EXIT
"""
# The state is read where nobody sees what it prints.
_RESTORE = b"{\n%s\n} > /dev/null 2>&1\n"


class Shell:
    def __init__(self, sandbox: Sandbox, folder: str, keep: int = 16_384) -> None:
        """Commands begin in `folder`; of the output of each, `keep` bytes are shown."""
        self._sandbox, self._folder, self._keep = sandbox, folder, keep
        self._state = b""

    async def bash(self, command: str, seconds: Annotated[int, Field(ge=1, le=MAX_SECONDS)] = 60) -> str:
        """Run a command in bash. The working directory, variables and functions stay for the next call. There is no input to
        read from. Long output is shortened in its middle.

        Args:
            command: one or several lines of bash
            seconds: time limit; when it has passed, the command is killed
        """
        restore = _RESTORE % self._state if self._state else b""
        ran = await self._sandbox.run(
            ["bash", "-c", _START],
            folder=self._folder,
            environment=_ENVIRONMENT,
            stdin=_checked(command) + b"\0" + _PRELUDE + restore,
            seconds=seconds,
            keep=MAX_STATE,
        )
        said = as_text(within(ran.stdout, self._keep)).rstrip("\n")
        end = f"[exit code {ran.code}]"
        if ran.timed_out:
            end = f"[killed after {seconds} s; folder, variables and functions are as they were before this command]"
        elif not ran.stderr.whole:
            end += f" [variables and functions are more than {MAX_STATE:,} bytes, so this command's were not kept]"
        elif ran.stderr.head.startswith(b"# state\n"):
            self._state = ran.stderr.head + ran.stderr.tail
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
