"""Real vLLM servers on this machine's CPU, with the bridges' tiny model."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "bridges"
START_SECONDS = 600

Serve = Callable[..., str]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bridges") / "model"
    subprocess.run([sys.executable, str(RECIPE / "make_model.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its logprobs are those of the sampled distribution."""
    with _serving(model, tmp_path_factory.mktemp("server"), "--logprobs-mode", "processed_logprobs") as url:
        yield url


@pytest.fixture(scope="session")
def raw_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As vLLM is by default: logprobs before temperature. It wants a key."""
    with _serving(model, tmp_path_factory.mktemp("raw"), "--api-key", "right") as url:
        yield url


@contextmanager
def _serving(model: Path, folder: Path, *options: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # The rebuild for CPUs has another name than the `vllm` command looks for; the module behind it does not ask.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "bridges",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", "32", "--enforce-eager", "--generation-config", "vllm"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *options]
    log = folder / "log.txt"
    with log.open("w") as file:
        running = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", running, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # with its engine, which is a process of its own
            running.wait()


def _wait(url: str, running: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and running.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
