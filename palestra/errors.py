"""The exception tree. What is raised decides who hears of it: the user, the model, or the dispatcher.

PalestraError
├── UsageError             the user: one line, exit code 2
│   ├── ConfigError            a key, value or file of the config
│   ├── ToolDefinitionError    a function that cannot become a tool
│   ├── TaskError              a task that breaks its contract
│   │   └── Unprepared             a task whose environment cannot be made here; others may be fine
│   ├── ModelError             a model, tokenizer or chat template that cannot be used
│   ├── BackendError           a server that is gone, or that refuses us
│   └── StorageError           a run directory that cannot be read or written
├── ToolError              the model: the text is its observation, and the run goes on
└── InfrastructureError    the dispatcher: not the model's fault, may be tried again
"""

import difflib
import traceback
from collections.abc import Iterable


class PalestraError(Exception):
    """Anything that Palestra raises on purpose."""


class UsageError(PalestraError):
    """Something the user can mend. Its text is one line that names what is wrong and what would be right."""


class ConfigError(UsageError):
    """A config file, key or value that is wrong."""


class ToolDefinitionError(UsageError):
    """A function that cannot become a tool."""


class TaskError(UsageError):
    """A task that does not keep its contract, such as a score that is not a number."""


class Unprepared(TaskError):
    """What one task needs cannot be made on this machine. A check of many tasks goes on with the others."""


class ModelError(UsageError):
    """A model, tokenizer or chat template that is missing or cannot be used."""


class BackendError(UsageError):
    """A server that a backend needs is gone, or refuses us: no rollout could succeed."""


class StorageError(UsageError):
    """A run directory or ledger that cannot be read or written."""


class ToolError(PalestraError):
    """Raise it in a tool to tell the model what went wrong; the run goes on."""


class InfrastructureError(PalestraError):
    """A sandbox, server or disk failed under a rollout. The rollout may be tried again, and never counts as reward 0."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: stop at once, as by Ctrl-C, but close everything first."""


def cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error of a task group, to raise in its place: the others were cancelled because of it."""
    error = errors.exceptions[0]
    return cause(error) if isinstance(error, BaseExceptionGroup) else error


def first_line(error: BaseException) -> str:
    """What it says, as far as one line goes; what it is where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def where_it_failed(error: BaseException) -> str:
    """What kind it is, what it says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<frozen")]  # those are Python's, of an import
    where = f" ({own[-1].name}, line {own[-1].lineno})" if own else ""  # one that was put into a group was never raised itself
    return f"{type(error).__name__}: {error}{where}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'steps'?``, or the known names when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
