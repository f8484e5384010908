"""Imports go downwards only, `import palestra` is light, and the README's file tree names every module in reading order."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In reading order. A module may import only what stands above it; `.*` stands for a package and all that is in it.
ORDER = (
    "palestra.errors",
    "palestra.interrupts",
    "palestra.cache",
    "palestra.sources",
    "palestra.environments",
    "palestra.result_file",
    "palestra.message",
    "palestra.tool",
    "palestra.trajectory",
    "palestra.advantage",
    "palestra.config.section",
    "palestra.config.backend_section",
    "palestra.config.openai",
    "palestra.config.backend",
    "palestra.config.dispatch",
    "palestra.config.sandbox",
    "palestra.config.hints",
    "palestra.config.tools",
    "palestra.config",
    "palestra.protocols",
    "palestra.sandbox",
    "palestra.sandbox.limits",
    "palestra.sandbox.cgroup",
    "palestra.sandbox.output",
    "palestra.sandbox.wire",
    "palestra.sandbox.supervised",
    "palestra.sandbox.started",
    "palestra.sandbox.slow_launch",
    "palestra.sandbox.slow_supervise",
    "palestra.sandbox.native",
    "palestra.sandbox.seccomp",
    "palestra.sandbox.layers",
    "palestra.sandbox.setup",
    "palestra.sandbox.bubblewrap",
    "palestra.sandbox.container",
    "palestra.sandbox.local",
    "palestra.sandbox.pool",
    "palestra.sandbox.opening",
    "palestra.sandbox.doctor",
    "palestra.sandbox.verbs",
    "palestra.sandboxes",
    "palestra.task",
    "palestra.taskset",
    "palestra.tools",
    "palestra.tools.code.symbols",
    "palestra.tools.code.languages",
    "palestra.tools.code.python",
    "palestra.tools.code.reading",
    "palestra.tools.code.braces",
    "palestra.tools.code.grammar",
    "palestra.tools.code.watch",
    "palestra.tools.code.files",
    "palestra.tools.code.store",
    "palestra.tools.code.base",
    "palestra.tools.code.names",
    "palestra.tools.code.references",
    "palestra.tools.code.dependencies",
    "palestra.tools.code.text",
    "palestra.tools.code.index",
    "palestra.tools.code.sandboxed",
    "palestra.tools.code.report",
    "palestra.tools.code.tools",
    "palestra.tools.code",
    "palestra.tools.output",
    "palestra.tools.lines",
    "palestra.tools.shell",
    "palestra.tools.edit",
    "palestra.tools.workspace",
    "palestra.tools.mcp",
    "palestra.tools.serving",
    "palestra.swe",
    "palestra.swe.diff",
    "palestra.swe.grading",
    "palestra.swe.agent",
    "palestra.swe.bench",
    "palestra.swe.bench.instance",
    "palestra.swe.bench.loading",
    "palestra.swe.bench.log_parsing",
    "palestra.swe.bench.official",
    "palestra.swe.bench.plan",
    "palestra.swe.bench.interpreters",
    "palestra.swe.bench.mirrors",
    "palestra.swe.bench.runtime",
    "palestra.swe.bench.copies",
    "palestra.swe.bench.verdict",
    "palestra.swe.bench.task",
    "palestra.swe.factory",
    "palestra.swe.factory.packages",
    "palestra.swe.factory.edit",
    "palestra.swe.factory.mutations",
    "palestra.swe.factory.inside",
    "palestra.swe.factory.inside.outcomes",
    "palestra.swe.factory.inside.trials",
    "palestra.swe.factory.runtime",
    "palestra.swe.factory.trials",
    "palestra.swe.factory.twists",
    "palestra.swe.factory.statement",
    "palestra.swe.factory.recipe",
    "palestra.swe.factory.making",
    "palestra.swe.factory.task",
    "palestra.swe.factory.forging",
    "palestra.swe.factory.proving",
    "palestra.swe.factory.small",
    "palestra.swe.factory.localise",
    "palestra.swe.factory.verbs",
    "palestra.render.tokenizer",
    "palestra.render.content",
    "palestra.render.calls",
    "palestra.render.thinking",
    "palestra.render.hermes",
    "palestra.render.llama3",
    "palestra.render.template",
    "palestra.render.jinja",
    "palestra.render.conversation",
    "palestra.render",
    "palestra.policy",
    "palestra.reminders",
    "palestra.hints.steps",
    "palestra.hints.rules",
    "palestra.hints",
    "palestra.agent",
    "palestra.rollout",
    "palestra.dispatch.room",
    "palestra.dispatch.flow",
    "palestra.dispatch.rewards",
    "palestra.dispatch.batch",
    "palestra.dispatch.bounded",
    "palestra.dispatch.pipeline",
    "palestra.dispatch.stream",
    "palestra.dispatch",
    "palestra.ledger.store",
    "palestra.ledger.packing",
    "palestra.ledger.invariants",
    "palestra.ledger.ledger",
    "palestra.ledger",
    "palestra.pace",
    "palestra.gather",
    "palestra.collect",
    "palestra.loss",
    "palestra.backends",
    "palestra.backends.listing",
    "palestra.backends.scripted",
    "palestra.backends.torch",
    "palestra.backends.torch.attention",
    "palestra.backends.torch.cache",
    "palestra.backends.torch.pieces",
    "palestra.backends.torch.draw",
    "palestra.backends.torch.packed",
    "palestra.backends.torch.placement",
    "palestra.backends.torch.sampler",
    "palestra.backends.torch.tree",
    "palestra.backends.torch.head",
    "palestra.backends.torch.lora",
    "palestra.backends.torch.passes",
    "palestra.backends.torch.trainer",
    "palestra.backends.torch.model",
    "palestra.backends.torch.opening",
    "palestra.backends.tinker",
    "palestra.backends.tinker.datum",
    "palestra.backends.tinker.calls",
    "palestra.backends.tinker.sampler",
    "palestra.backends.tinker.trainer",
    "palestra.backends.tinker.opening",
    "palestra.backends.tinker.serving",
    "palestra.backends.tinker.engine",
    "palestra.backends.openai",
    "palestra.backends.openai.limits",
    "palestra.backends.openai.usage",
    "palestra.backends.openai.client",
    "palestra.backends.openai.wire",
    "palestra.backends.openai.chat",
    "palestra.backends.openai.tokens",
    "palestra.backends.openai.opening",
    "palestra.backends.opening",
    "palestra.statistics",
    "palestra.evaluation",
    "palestra.checkpoint",
    "palestra.runs",
    "palestra.comparison",
    "palestra.plot",
    "palestra.report",
    "palestra.warm_start",
    "palestra.learner",
    "palestra.training",
    "palestra.bridges",
    "palestra.bridges.verl",
    "palestra.bridges.verl.scene",
    "palestra.bridges.verl.rows",
    "palestra.bridges.verl.settings",
    "palestra.bridges.verl.record",
    "palestra.bridges.verl.watching",
    "palestra.bridges.verl.desk",
    "palestra.bridges.verl.sampler",
    "palestra.bridges.verl.loop",
    "palestra.bridges.verl.dataset",
    "palestra.bridges.verl.estimator",
    "palestra.bridges.verl.trainer_hooks",
    "palestra.bridges.verl.cpu.platform",
    "palestra.bridges.verl.cpu.server",
    "palestra.bridges.verl.cpu",
    "palestra.bridges.verl.exporting",
    "palestra.bridges.verl.driving",
    "palestra.bridges.skyrl_train",
    "palestra.bridges.skyrl_train.handover",
    "palestra.bridges.skyrl_train.estimators",
    "palestra.bridges.skyrl_train.losses",
    "palestra.bridges.skyrl_train.sampler",
    "palestra.bridges.skyrl_train.account",
    "palestra.bridges.skyrl_train.generator",
    "palestra.bridges.skyrl_train.trainers",
    "palestra.bridges.skyrl_train.settings",
    "palestra.bridges.skyrl_train.cpu_engine",
    "palestra.bridges.skyrl_train.cpu_workers",
    "palestra.bridges.skyrl_train.experiment",
    "palestra.bridges.skyrl_train.entry",
    "palestra.lab",
    "palestra.lab.clock",
    "palestra.lab.workload",
    "palestra.lab.progress",
    "palestra.lab.pool",
    "palestra.lab.context",
    "palestra.lab.kv",
    "palestra.lab.totals",
    "palestra.lab.precedence",
    "palestra.lab.inflow",
    "palestra.lab.engine",
    "palestra.lab.cluster",
    "palestra.lab.account",
    "palestra.lab.published",
    "palestra.lab.simulation",
    "palestra.lab.own",
    "palestra.lab.ceiling",
    "palestra.lab.picture",
    "palestra.lab.recording",
    "palestra.lab.fitting",
    "palestra.lab.machine",
    "palestra.lab.model",
    "palestra.lab.replay",
    "palestra.gantt",
    "palestra.plan",
    "palestra.checking",
    "palestra.trying",
    "palestra.verbs",
    "palestra.bench.*",
    "palestra.bench_verbs",
    "palestra.cli",
    "palestra.__main__",
    "palestra",
)

MAY_IMPORT_LAZILY = {"palestra.verbs", "palestra.bench_verbs", "palestra.cli", "palestra.backends.opening"}
"""They open what a command or a config names, and so may import anything inside a function."""

HEAVY = {"torch", "transformers", "peft", "safetensors", "huggingface_hub", "gguf", "trl", "datasets", "wandb", "tensorboard"}
HEAVY |= {"tinker", "skyrl", "jax", "mcp", "httpx2"}
MAY_BE_HEAVY = (
    "palestra.loss",
    "palestra.backends.torch",
    "palestra.backends.tinker",
    "palestra.backends.openai",
    "palestra.bridges",
    "palestra.bench",
)


def _modules() -> dict[str, Path]:
    files = sorted((ROOT / "palestra").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = _modules()


def _rank(module: str) -> int:
    for rank, entry in enumerate(ORDER):
        if module == entry or (entry.endswith(".*") and f"{module}.".startswith(entry.removesuffix("*"))):
            return rank
    pytest.fail(f"{module} is not in ORDER of {Path(__file__).name}: put it where it is read, and into the README's file tree")


def _imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that is imported, and whether only inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in MODULES else str(child.module)), lazy
        else:
            yield from _imports(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _imports_of(module: str) -> list[tuple[str, bool]]:
    return list(_imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    own = _rank(module)
    for imported, lazy in _imports_of(module):
        if imported.split(".")[0] != "palestra" or (lazy and module in MAY_IMPORT_LAZILY):
            continue
        inside_a_package = ORDER[own].endswith(".*") and _rank(imported) == own
        assert _rank(imported) < own or inside_a_package, f"{module} imports {imported}, which stands later in ORDER"


def test_every_entry_exists() -> None:
    assert [entry for entry in ORDER if entry.removesuffix(".*") not in MODULES] == []


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith(MAY_BE_HEAVY)])
def test_heavy_packages_are_imported_only_where_they_are_used(module: str) -> None:
    assert [name for name, lazy in _imports_of(module) if name.split(".")[0] in HEAVY and not lazy] == []


def test_import_is_light() -> None:
    code = "import sys, palestra; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pydantic" in loaded  # the list is a list
    assert loaded & HEAVY == set()


def test_the_readme_names_every_module_in_reading_order() -> None:
    named = list(_tree((ROOT / "README.md").read_text(encoding="utf-8")))
    assert sorted(named) == sorted(str(file.relative_to(ROOT)) for file in MODULES.values())
    ranks = [_rank(_name(path)) for path in named if not path.endswith("__init__.py")]
    assert ranks == sorted(ranks)


def _tree(readme: str) -> Iterator[str]:
    """The Python files in the README's tree; a folder's line stands for its `__init__.py`."""
    block = next(block for block in re.findall(r"```text\n(.*?)```", readme, re.DOTALL) if block.startswith("palestra/"))
    folders: list[str] = []
    for line in block.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        del folders[len(indent) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        if name.endswith(("/", ".py")):
            yield "".join(folders) + ("__init__.py" if name.endswith("/") else name)


def _name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
