"""`palestra backends`: of each backend, what is installed, which versions, and what it does."""

from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

from palestra.environments import ENVIRONMENTS

_EMBEDDED = ("torch", "transformers", "peft")


def listing() -> Table:
    table = Table("backend", "installed", "versions", "what it does", box=None, pad_edge=False)
    versions = {package: _version(package) for package in _EMBEDDED}
    missing = [package for package, found in versions.items() if found is None]
    table.add_row(
        "torch",
        "no: pip install torch==2.13.0, then palestra[torch]" if missing else "yes",
        _shown({package: found for package, found in versions.items() if found is not None}),
        "trains and evaluates in this process",
    )
    table.add_row("scripted", "yes", "", "plays given replies, for tests of tasks and tools")
    client = _version("httpx2")
    table.add_row(
        "openai",
        "no: pip install palestra[openai]" if client is None else "yes",
        _shown({"httpx2": client} if client else {}),
        "evaluates models behind OpenAI-compatible servers",
    )
    for name, environment in ENVIRONMENTS.items():
        installed = "yes" if environment.installed else f"no: palestra backends install {name}"
        table.add_row(name, installed, _shown(environment.versions()), environment.does)
    return table


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shown(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {found}" for package, found in versions.items())
