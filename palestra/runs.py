"""A run's folder: the resolved config, the ledger, checkpoints, metrics, pictures, and the summary at the end."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra import config as configs
from palestra.config import Config
from palestra.errors import ConfigError, StorageError
from palestra.ledger import Ledger
from palestra.ledger.store import lock


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.sqlite"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.curve = path / "curve.png"
        self.cache = path / "cache"

    @staticmethod
    def create(path: Path, config: Config, fresh: bool = False) -> "RunFolder":
        """A new folder. One that holds a run already is refused, or kept aside under another name when `fresh`."""
        run = RunFolder(path)
        if run.ledger.exists():
            if not fresh:
                raise StorageError(
                    f"{path} holds a run already; go on with `palestra train --resume {path}`, "
                    f"keep it aside with --fresh, or name another with run.folder=PATH"
                )
            with lock(run.ledger), _storing(path):  # a run that is being written stays where it is
                path.rename(free_name(path.absolute()))  # whose name is not "."
        with _storing(path):
            run.cache.mkdir(parents=True, exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
            (path / "config.toml").write_text(configs.dump(config), encoding="utf-8")
        return run

    @staticmethod
    def reopen(path: Path) -> tuple["RunFolder", Config]:
        if not (path / "config.toml").is_file():
            raise ConfigError(f"{path} is no run: it has no config.toml; give the folder of a run")
        return RunFolder(path), configs.load(path / "config.toml")

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        with _storing(self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows so far, without one that a full disk cut short or that is damaged."""
        rows = []
        for line in self.metrics.read_bytes().splitlines() if self.metrics.exists() else ():
            with suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
        return rows

    def refuse_fewer_steps(self, config: Config) -> None:
        """A run cannot go back: its config may have been edited since."""
        if config.training is None or not self.ledger.exists():
            return
        with Ledger.open(self.ledger, read_only=True) as ledger:
            done = ledger.committed_step() + 1
        if done > config.training.steps:
            raise ConfigError(
                f"{self.path} has {done} steps behind it, so training.steps = {config.training.steps} in its config.toml "
                f"is too few; set it to {done} or more"
            )

    def keep_metrics(self, before: int) -> None:
        """Forget the rows of what a run that goes on from this step will do again."""
        rows = [row for row in self.read_metrics() if row["step"] < before or ("evaluation" in row and row["step"] == before)]
        partial = self.metrics.with_suffix(".part")
        with _storing(self.path):
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            partial.replace(self.metrics)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        partial = self.summary.with_suffix(".part")
        with _storing(self.path):
            partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            partial.replace(self.summary)


@contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one clear line."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"cannot write in {path}: {reason}; nothing recorded before is lost") from None


def free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
