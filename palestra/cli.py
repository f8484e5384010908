"""The command line. What the user can mend comes out as one line and exit code 2; nothing else is caught."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from palestra import environments, interrupts, result_file
from palestra.bench_verbs import add_bench
from palestra.errors import PalestraError, Terminated, UsageError

OVERRIDES = "section.key=value: overrides a key of the config, such as training.steps=4"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    for word in rest:  # argparse leaves overrides that stand behind an option
        if word.startswith("-") or "=" not in word or not hasattr(options, "overrides"):
            parser.error(f"unrecognized argument: {word}")
        options.overrides.append(word)
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interrupts.handled():
            result_file.check(getattr(options, "json", None))
            code: int = options.verb(options)
    except UsageError as error:
        return _complain(error, 2)
    except PalestraError as error:
        return _complain(error, 1)
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code


def _complain(error: PalestraError, code: int) -> int:
    sys.stderr.write(f"palestra: {' '.join(str(error).split())}\n")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="palestra", description="Train and evaluate LLM agents that use tools over many turns.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    train = verbs.add_parser("train", help="train an agent")
    train.add_argument("config", type=Path, nargs="?", help="the TOML file of the run")
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    train.add_argument("--fresh", action="store_true", help="keep an earlier run in the same folder aside, and begin anew")
    train.set_defaults(verb=_train)

    evaluate = verbs.add_parser("eval", help="evaluate on held-out tasks: pass@1 and pass@k with 95%% intervals")
    evaluate.add_argument("config", type=Path, nargs="?", help="the TOML file")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    evaluate.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="do what is missing or failed in this evaluation's folder"
    )
    evaluate.add_argument("--json", type=Path, metavar="PATH", help="write the result here too")
    evaluate.set_defaults(verb=_eval)

    attempt = _verb(verbs, "try", "run one task and print it live, turn by turn")
    attempt.add_argument("--task", metavar="ID", help="which task; the first held-out one by default")
    attempt.set_defaults(verb=_try)

    check = _verb(verbs, "check", "prove the tasks: the gold solution scores 1, doing nothing scores 0")
    check.add_argument("--only", metavar="IDS", help="task ids, separated by commas")
    check.add_argument("--sample", type=int, metavar="N", help="so many tasks, chosen by run.seed")
    check.add_argument("--mirrors", metavar="DIR", help="bare git repositories: the same as tasks.arguments.mirrors=DIR")
    check.add_argument("--json", type=Path, metavar="PATH", help="write tasks, gold, noop, failures and seconds here")
    check.set_defaults(verb=_check)

    plan = verbs.add_parser("plan", help="where a run's time went, and what each change would save")
    plan.add_argument("run", type=Path, metavar="RUN", help="the folder of a training run")
    plan.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    plan.add_argument("--picture", type=Path, metavar="PATH", help="draw a step here; RUN/plan.png by default")
    plan.set_defaults(verb=_plan)

    compare = verbs.add_parser("compare", help="two evaluations of the same tasks: paired differences with 95%% intervals")
    compare.add_argument("before", metavar="RUN[@STEPS]", help="the folder of a run or an evaluation; alone: its first and last")
    compare.add_argument("after", metavar="RUN[@STEPS]", nargs="?", help="what to compare it with")
    compare.add_argument(
        "--reach", type=float, metavar="REWARD", help="also what training took until a step earned this on average"
    )
    compare.add_argument("--json", type=Path, metavar="PATH", help="write all figures here")
    compare.set_defaults(verb=_compare)

    _add_backends(verbs)
    _add_factory(verbs)
    _add_sandbox(verbs)
    mcp = verbs.add_parser("mcp", help="give tools to other programs, over MCP").add_subparsers(required=True, metavar="WHAT")
    serve = mcp.add_parser("serve", help="serve shell, editor and code search on standard input and output")
    serve.add_argument("folder", type=Path, metavar="FOLDER", help="where they work")
    serve.add_argument("--sandbox", action="store_true", help="work on a copy in a sandbox, which is forgotten at the end")
    serve.set_defaults(verb=_mcp_serve)

    add_bench(verbs)
    return parser


def _add_backends(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    backends = verbs.add_parser("backends", help="what is installed of each backend; make its environment, or run its Python")
    backends.set_defaults(verb=_backends)
    actions = backends.add_subparsers(metavar="ACTION")
    install = actions.add_parser("install", help="make the environment of a backend, from its lock file")
    install.add_argument("names", nargs="+", metavar="NAME", choices=sorted(environments.ENVIRONMENTS))
    install.set_defaults(verb=_backends_install)
    run = actions.add_parser("run", help="run the Python of a backend's environment, such as: run tinker -m pytest")
    run.add_argument("name", metavar="NAME", choices=sorted(environments.ENVIRONMENTS))
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what to give to Python")
    run.set_defaults(verb=_backends_run)


def _add_sandbox(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sandbox = verbs.add_parser("sandbox", help="try a sandbox by hand, examine the host, clear up after a crash")
    kinds = sandbox.add_subparsers(required=True, metavar="WHAT")
    run = kinds.add_parser("run", help="run a command in a new sandbox")
    run.add_argument("--network", action="store_true", help="share the host's network")
    run.add_argument("--folder", type=Path, metavar="PATH", help="copy this folder to the sandbox's working folder")
    run.add_argument("--seconds", type=float, default=600.0, metavar="N", help="the time limit; 600 by default")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")
    run.set_defaults(verb=_sandbox_run)
    kinds.add_parser("doctor", help="what this host can and cannot protect").set_defaults(verb=_sandbox_doctor)
    sweep = kinds.add_parser("sweep", help="remove what crashed processes left behind")
    sweep.add_argument("--snapshots", action="store_true", help="also every snapshot in the cache; nothing may be using them")
    sweep.set_defaults(verb=_sandbox_sweep)


def _add_factory(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    factory = verbs.add_parser("factory", help="bug-fix tasks from real packages: make a set, or prove that its tests are enough")
    kinds = factory.add_subparsers(required=True, metavar="WHAT")
    make = kinds.add_parser("make", help="make a task set; every task is proven as it is made")
    make.add_argument("path", type=Path, metavar="SET", help="the file to write, such as set.jsonl.gz")
    make.add_argument("--packages", metavar="NAMES", help="separated by commas; by default all whose tests are quick and steady")
    make.add_argument("--each", type=int, default=66, metavar="N", help="up to so many tasks of a package; 66 by default")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="decides which changes are tried; 0 by default")
    make.add_argument("--json", type=Path, metavar="PATH", help="write what became of all that was tried here")
    make.set_defaults(verb=_factory_make)
    prove = kinds.add_parser("prove", help="run the whole suites on a sample, and compare")
    prove.add_argument("path", type=Path, metavar="SET", help="the task set")
    prove.add_argument("--sample", type=int, default=50, metavar="N", help="so many tasks; 50 by default")
    prove.add_argument("--forged", type=int, default=10, metavar="N", help="play the forgeries on so many tasks; 10 by default")
    prove.add_argument("--seed", type=int, default=0, metavar="N", help="decides which; 0 by default")
    prove.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    prove.set_defaults(verb=_factory_prove)


def _factory_make(options: argparse.Namespace) -> int:
    from palestra.swe.factory import verbs

    names = [name for name in (options.packages or "").split(",") if name]
    console = Console(soft_wrap=True, highlight=False)
    making = verbs.make(console, options.path, names, options.each, options.seed)
    result_file.write(options.json, interrupts.run(making))
    return 0


def _factory_prove(options: argparse.Namespace) -> int:
    from palestra.swe.factory import verbs

    console = Console(soft_wrap=True, highlight=False)
    proof = verbs.prove(console, options.path, options.sample, options.forged, options.seed)
    result_file.write(options.json, interrupts.run(proof))
    return 0


def _sandbox_run(options: argparse.Namespace) -> int:
    from palestra.sandbox import verbs

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return verbs.run(command, options.network, options.folder, options.seconds)


def _mcp_serve(options: argparse.Namespace) -> int:
    from palestra.tools.serving import serve_folder

    interrupts.run(serve_folder(options.folder, options.sandbox))
    return 0


def _sandbox_doctor(options: argparse.Namespace) -> int:
    from palestra.sandbox import verbs

    return interrupts.run(verbs.examine(Console(soft_wrap=True, highlight=False)))


def _sandbox_sweep(options: argparse.Namespace) -> int:
    from palestra.sandbox import verbs

    return interrupts.run(verbs.sweep(Console(soft_wrap=True, highlight=False), options.snapshots))


def _verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text)
    verb.add_argument("config", type=Path, help="the TOML file")
    verb.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES)
    return verb


def _enter_environment(options: argparse.Namespace, resume: Path | None = None) -> None:
    """Go on where the config's backend is installed; a wrong config is refused before that."""
    from palestra.config import load
    from palestra.runs import RunFolder

    config = load(options.config, options.overrides) if resume is None else RunFolder.reopen(resume)[1]
    environments.enter(config.backend.environment, options.arguments)


def _train(options: argparse.Namespace) -> int:
    from palestra.verbs import train

    if (options.resume is None) == (options.config is None):
        raise UsageError("train takes a config file, or --resume RUN")
    _enter_environment(options, options.resume)
    if options.resume is not None:
        summary = train(options.resume, *options.overrides, resume=True, fresh=options.fresh)
    else:
        summary = train(options.config, *options.overrides, fresh=options.fresh)
    if summary.get("stopped"):
        return 130
    shown = {key: summary[key] for key in ("base", "final", "steps", "seconds", "adapter")}
    Console(soft_wrap=True, highlight=False).print(json.dumps(shown))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from palestra.verbs import evaluate

    if (options.resume is None) == (options.config is None):
        raise UsageError("eval takes a config file, or --resume FOLDER")
    _enter_environment(options, options.resume)
    if options.resume is not None:
        result = evaluate(options.resume, *options.overrides, resume=True)
    else:
        result = evaluate(options.config, *options.overrides)
    result_file.write(options.json, result.to_json())
    return 0


def _try(options: argparse.Namespace) -> int:
    from palestra.trying import try_task

    _enter_environment(options)
    return try_task(options.config, options.overrides, options.task)


def _check(options: argparse.Namespace) -> int:
    from palestra.checking import Verdict
    from palestra.verbs import check

    console = Console(soft_wrap=True, highlight=False)

    def show(verdict: Verdict) -> None:
        for problem in verdict.problems:
            console.print(f"{verdict.task_id}: {problem}", markup=False)

    only = [name for name in (options.only or "").split(",") if name]
    if options.mirrors is not None:
        options.overrides.append(f"tasks.arguments.mirrors={json.dumps(options.mirrors)}")  # a TOML string, whatever is in it
    result = check(options.config, *options.overrides, only=only, sample=options.sample, on_verdict=show)
    console.print(f"{result['tasks']} tasks: gold scores 1 in {result['gold']}, doing nothing scores 0 in {result['noop']}")
    if (took := result["seconds"])["most"] >= 1:
        console.print(f"both together took {took['median']:.1f} s for a task (median), {took['most']:.1f} s at most")
    result_file.write(options.json, result)
    return 1 if result["failures"] else 0


def _backends(options: argparse.Namespace) -> int:
    from palestra.backends.listing import listing

    Console(highlight=False, width=None if Console().is_terminal else 150).print(listing())
    return 0


def _backends_install(options: argparse.Namespace) -> int:
    console = Console(soft_wrap=True, highlight=False)
    for name in options.names:
        environments.install(environments.find(name))
        console.print(f"{name}: installed in {environments.find(name).folder}", markup=False)
    return 0


def _backends_run(options: argparse.Namespace) -> int:
    environments.run(environments.find(options.name), options.words)


def _plan(options: argparse.Namespace) -> int:
    from palestra.plan import plan, render

    if options.picture is not None and options.picture.is_dir():
        raise UsageError(
            f"--picture {options.picture} is a folder; give the file to draw, such as {options.picture / 'plan.png'}"
        )
    made = plan(options.run, options.picture or options.run / "plan.png")
    render(made, Console(soft_wrap=True, highlight=False, markup=False))
    result_file.write(options.json, made.to_json())
    return 0


def _compare(options: argparse.Namespace) -> int:
    from palestra.comparison import compare, render

    compared = compare(options.before, options.after, options.reach)
    render(compared, Console(highlight=False, markup=False, width=None if Console().is_terminal else 150))
    result_file.write(options.json, compared.to_json())
    return 0
