"""A Tinker server on this machine: SkyRL's, with its jax engine. Runs in the environment of that name.

    palestra backends run tinker -m palestra.backends.tinker.serving --model FOLDER --state FOLDER [--port 8000]

Two things of skyrl 0.3.0 are bridged: a type that Python 3.11 cannot use in a schema, and an engine that is started by `uv run`.
"""

import argparse
import os
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

from palestra.cache import cache_folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="palestra.backends.tinker.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="the folder of the base model")
    parser.add_argument(
        "--state", type=Path, required=True, help="where its database and saved states are kept for later servers"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sequences", type=int, default=64, help="sampled at once; every batch is padded to this")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences of one training pass")
    parser.add_argument("--adapters", type=int, default=3, help="runs at once; on a CPU every token pays for all of them")
    parser.add_argument("--rank", type=int, default=16, help="the largest rank of an adapter")
    serve(parser.parse_args())


def serve(options: argparse.Namespace) -> None:
    """Serve until the process is told to end."""
    bridge_typed_dict()
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig

    state = options.state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "jax"))  # the engine compiles for a minute or two
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    api._build_uv_run_cmd_engine = _engine_command
    api.app.state.engine_config = EngineConfig(
        base_model=str(options.model.resolve()),
        backend_config={
            "sample_max_num_sequences": options.sequences,
            "train_micro_batch_size": options.micro_batch,
            "max_lora_adapters": options.adapters + 1,  # the first is the base model's
            "max_lora_rank": options.rank,
        },
        checkpoints_base=state / "checkpoints",
        database_url=f"sqlite:///{state / 'tinker.db'}",
    )
    uvicorn.run(api.app, host=options.host, port=options.port, log_level="warning")


def bridge_typed_dict() -> None:
    """pydantic refuses `typing.TypedDict` before Python 3.12, and skyrl's types use it."""
    if sys.version_info < (3, 12):
        typing.TypedDict = typing_extensions.TypedDict


def _engine_command(parent: list[str], engine_config: Any) -> list[str]:
    """This interpreter, where skyrl would have `uv run` look for one."""
    from skyrl.tinker.config import config_to_argv

    return [sys.executable, "-m", "palestra.backends.tinker.engine", *config_to_argv(engine_config)]


if __name__ == "__main__":
    main()
