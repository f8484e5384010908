"""Finding the tasks that a config names, and the order in which training takes them."""

import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.config import Tasks
from palestra.errors import ConfigError, TaskError, nearest, where_it_failed
from palestra.task import AnyTask, Task


def load(section: Tasks, key: str) -> list[AnyTask]:
    """The task set that the config's `tasks.<key>` names."""
    name: str | None = getattr(section, key)
    if name is None:
        raise ConfigError(f"the key 'tasks.{key}' is missing; write {key} = \"module:object\"")
    found = find_object(name, section.folder, f"tasks.{key}")
    with _without_exit(f"tasks.{key} = {name!r}"):
        made = _made(found, section.arguments, name)
        try:
            each = iter(made)
        except TypeError:
            raise TaskError(f"tasks.{key} = {name!r} gives {type(made).__name__}; it must give a sequence of tasks") from None
        tasks = list(each)
    _check(tasks, f"tasks.{key} = {name!r}")
    return tasks


def _made(found: Any, arguments: Mapping[str, Any], name: str) -> Any:
    misfit = f"tasks.arguments = {dict(arguments)!r} does not fit {name!r}"
    if not callable(found):
        if arguments:
            raise ConfigError(f"{misfit}: it is {type(found).__name__}, not a function")
        return found
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{misfit}: {error}") from None
    return found(**arguments)


def _check(tasks: Sequence[object], where: str) -> None:
    if not tasks:
        raise TaskError(f"{where} has no tasks")
    seen: set[str] = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise TaskError(f"{where} holds {type(task).__name__}; every item must be a Task")
        if not isinstance(task.id, str):
            raise TaskError(f"{where} has a task with the id {task.id!r}; an id is text, such as {str(task.id)!r}")
        if task.id in seen:
            raise TaskError(f"{where} has two tasks with the id {task.id!r}")
        seen.add(task.id)


@contextmanager
def _without_exit(where: str) -> Iterator[None]:
    """Other mistakes of a recipe are shown as they are; this one would end us without a word."""
    try:
        yield
    except SystemExit as error:
        raise TaskError(f"{where} ends the program: {where_it_failed(error)}; raise another error there") from None


def find_object(name: str, folder: Path, where: str) -> Any:
    """Import `module:object`; the module is looked for in the folder first."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f'{where} = {name!r}: write module:object, such as "task:train"')
    with _without_exit(f"{where} = {name!r}"):
        module = _import(module_name, folder, where)
    if not hasattr(module, attribute):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{where} = {name!r}: {module_name} has no {attribute!r}{nearest(attribute, known)}")
    return getattr(module, attribute)


def _import(name: str, folder: Path, where: str) -> ModuleType:
    path = folder / (name.replace(".", "/") + ".py")
    if not path.is_file():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # the module is there, and lacks another
                raise
            raise ConfigError(f"{where}: no module {name!r}, neither {path} nor an installed one") from None
    # Each recipe may call its module `task`: the folder keeps them apart.
    unique = f"palestra_tasks_{abs(hash(path.resolve()))}_{name.replace('.', '_')}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # so that a recipe's modules find each other
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def batch(tasks: Sequence[AnyTask], step: int, size: int, seed: int) -> list[AnyTask]:
    """The tasks of one step, all different. Every epoch has a new order; what no longer fills a step at its end is left out."""
    epoch, place = divmod(step, len(tasks) // size)
    order = random.Random(f"{seed}/{epoch}").sample(tasks, len(tasks))
    return order[place * size : (place + 1) * size]
