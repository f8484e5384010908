"""The command line's `palestra bench` verbs. Each measures against a peer or a limit in the same run."""

import argparse
from pathlib import Path

from rich.console import Console

from palestra import result_file
from palestra.errors import UsageError


def add_bench(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = verbs.add_parser("bench", help="measure speed and memory against a peer or a limit")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    engine = benches.add_parser("engine", help="the embedded engine against transformers' generate and TRL's GRPO step")
    engine.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    engine.add_argument("--skip-trl", action="store_true", help="leave out the comparison with TRL, which takes minutes")
    engine.set_defaults(verb=_engine)
    race = benches.add_parser("dispatch", help="schedules against each other and the physical limit, on a virtual clock")
    race.add_argument("--seeds", metavar="LIST", help="separated by commas; 0,1,2 by default")
    race.add_argument(
        "--workload",
        metavar="FILE",
        help="a TOML file, or w1 (the default), w1_shared, w1_whole_chunks, long_tools, costly_init, bare",
    )
    race.add_argument("--dispatcher", metavar="FILE:function", help="race this one too")
    race.add_argument("--steps", type=int, metavar="N", help="so many steps instead of the workload's")
    race.add_argument("--piece", type=int, metavar="N", help="stream keeps KV for so many tokens of a reply; 256 by default")
    race.add_argument("--json", type=Path, metavar="PATH", help="write the rows here")
    instead = race.add_mutually_exclusive_group()
    instead.add_argument("--real", action="store_true", help="instead of the lab: a real model on one core, stages on another")
    instead.add_argument(
        "--overhead", action="store_true", help="instead of a race: what dispatching 100,000 empty rollouts costs"
    )
    instead.add_argument("--pictures", type=Path, metavar="FOLDER", help="instead of a race: draw each schedule")
    race.set_defaults(verb=_dispatch)
    search = benches.add_parser("search", help="code search on Django, beside ripgrep and universal-ctags")
    search.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    search.set_defaults(verb=_search)
    boxes = benches.add_parser("sandbox", help="sandboxes against a bare process, a bare bwrap and podman; what is left behind")
    boxes.add_argument("--crowd", type=int, default=1000, metavar="N", help="how many are alive at once; 1000 by default")
    boxes.add_argument("--cycles", type=int, default=1000, metavar="N", help="how many come and go; 1000 by default")
    boxes.add_argument("--podman", metavar="WORDS", help="race podman too: its words up to the image, as 'run --rm debian'")
    boxes.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    boxes.set_defaults(verb=_sandbox)


def _engine(options: argparse.Namespace) -> int:
    from palestra.bench.engine import bench_engine

    result_file.write(options.json, bench_engine(Console(soft_wrap=True, highlight=False), with_trl=not options.skip_trl))
    return 0


def _dispatch(options: argparse.Namespace) -> int:
    from palestra.bench.dispatch import PIECE, bench_dispatch

    # Tables need room in a file too, and a path is no markup.
    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 150)
    _refuse_what_only_a_race_takes(options)
    if options.pictures is not None:
        from palestra.lab.picture import draw_schedules

        try:
            pictures = draw_schedules(options.pictures)
        except OSError as error:
            raise UsageError(f"--pictures {options.pictures}: {error.strerror}; give a folder that can be written") from None
        for picture in pictures:
            console.print(str(picture))
        return 0
    if options.overhead:
        from palestra.bench.overhead import bench_overhead

        result_file.write(options.json, bench_overhead(console))
        return 0
    if options.real:
        from palestra.bench.real import bench_real

        result_file.write(options.json, bench_real(console))
        return 0
    try:
        seeds = [0, 1, 2] if options.seeds is None else [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {options.seeds}: give different whole numbers from 0 on, separated by commas, such as 0,1,2")
    for name, value in (("steps", options.steps), ("piece", options.piece)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: give 1 or more")
    piece = PIECE if options.piece is None else options.piece
    workload = "w1" if options.workload is None else options.workload
    race = bench_dispatch(console, workload, seeds, options.dispatcher, options.steps, piece)
    result_file.write(options.json, race.rows)
    if race.fault is not None:
        raise race.fault
    return 0


def _refuse_what_only_a_race_takes(options: argparse.Namespace) -> None:
    modes = {"--real": options.real, "--overhead": options.overhead, "--pictures": options.pictures is not None}
    mode = next((name for name, chosen in modes.items() if chosen), None)
    ignored = ["seeds", "workload", "dispatcher", "steps", "piece", *(["json"] if mode == "--pictures" else [])]
    given = next((name for name in ignored if getattr(options, name) is not None), None)
    if mode is not None and given is not None:
        raise UsageError(f"--{given} has no effect with {mode}; leave one of them out")


def _search(options: argparse.Namespace) -> int:
    from palestra.bench.search import bench_search

    result_file.write(options.json, bench_search(Console(soft_wrap=True, highlight=False)))
    return 0


def _sandbox(options: argparse.Namespace) -> int:
    from palestra.bench.sandbox import bench_sandbox

    if options.crowd < 1 or options.cycles < 1:
        raise UsageError("--crowd and --cycles: give 1 or more")
    console = Console(soft_wrap=True, highlight=False)
    result_file.write(options.json, bench_sandbox(console, options.crowd, options.cycles, options.podman))
    return 0
