"""A server that is not there, rejects the key, stalls, talks nonsense or dies: one clear line each, and the run goes on later."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bridges.tinker.local_server import RECIPE, Server, free_port

from palestra.backends.tinker.opening import open_tinker
from palestra.config import Config
from palestra.errors import ConfigError, InfrastructureError, ModelError, UsageError
from palestra.ledger import Ledger
from palestra.protocols import Sampling

Recipe = Callable[..., Config]


class Proxy:
    """Stands before the real server, and is as bad as it is told to be."""

    def __init__(self, target: int) -> None:
        self.target, self.port, self.mode = target, free_port(), "pass"
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        ready.set()
        self.loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "pass":
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
            await asyncio.gather(self._pump(reader, inner_writer), self._pump(inner_reader, writer), return_exceptions=True)
        elif self.mode == "stall":
            await asyncio.sleep(3600)
        else:
            await reader.read(65536)
            status, body = {"reject": ("401 Unauthorized", '{"detail": "no"}'), "garbage": ("200 OK", "<html>lunch</html>")}[
                self.mode
            ]
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await reader.read(65536)) and self.mode == "pass":
            writer.write(data)
            await writer.drain()
        if self.mode == "stall":
            await asyncio.sleep(3600)
        writer.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)


async def test_no_server_is_said_at_once(recipe: Recipe) -> None:
    config = recipe(f"backend.base_url=http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"no Tinker server answers at .*; start one, or mend backend.base_url"):
        async with open_tinker(config, config.backend, training=True):  # type: ignore[arg-type]
            pass
    assert time.monotonic() - started < 20


async def test_a_rejected_key_is_the_users(recipe: Recipe, proxy: Proxy) -> None:
    proxy.mode = "reject"
    config = recipe(f"backend.base_url=http://127.0.0.1:{proxy.port}")
    with pytest.raises(UsageError, match=r"rejects the key.*TINKER_API_KEY"):
        async with open_tinker(config, config.backend, training=True):  # type: ignore[arg-type]
            pass


async def test_the_hosted_service_needs_a_key(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    section = recipe().backend.model_copy(update={"base_url": None})
    with pytest.raises(ConfigError, match="set TINKER_API_KEY"):
        async with open_tinker(recipe(), section, training=False):  # type: ignore[arg-type]
            pass


async def test_an_unknown_model_is_named(recipe: Recipe, server: Server) -> None:
    section = recipe().backend.model_copy(update={"model": "no/such-model", "tokenizer": str(server.model)})
    with pytest.raises(ModelError, match="has no model 'no/such-model'"):
        async with open_tinker(recipe(), section, training=True):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(("mode", "complaint"), [("stall", "did not sample within 4 s"), ("garbage", "sample")])
async def test_a_sample_that_fails_may_be_tried_again(recipe: Recipe, proxy: Proxy, mode: str, complaint: str) -> None:
    config = recipe(f"backend.base_url=http://127.0.0.1:{proxy.port}")
    async with open_tinker(config, config.backend, training=False) as (sampler, renderer, _):  # type: ignore[arg-type]
        prompt = renderer.prompt([], [])
        async with sampler.session(0, 100) as session:
            first = await session.sample(prompt, Sampling(1.0, 4, renderer.stop_ids))
            assert first.tokens
            sampler._line.seconds = 4.0
            proxy.mode = mode
            with pytest.raises(InfrastructureError, match=complaint):
                await session.sample(prompt, Sampling(1.0, 4, renderer.stop_ids))
            proxy.mode, sampler._line.seconds = "pass", 60.0
            again = await session.sample(prompt, Sampling(1.0, 4, renderer.stop_ids))
            assert again.tokens


def test_a_run_outlives_its_server(model: Path, tmp_path: Path) -> None:
    """Killed in the middle: the run says so and stops. With a server over the same state it goes on, and trains nothing twice."""
    server = Server(model, tmp_path / "state", free_port())
    server.start()
    run = tmp_path / "run"
    words = [f"run.folder={run}", f"backend.model={model}", f"backend.base_url={server.address}", "backend.seconds=120"]
    words += ["training.steps=4", "training.groups=1", "evaluation.tasks=8", "dispatch.retries=0"]
    command = [sys.executable, "-m", "palestra", "train"]
    begun = subprocess.Popen([*command, str(RECIPE / "tinker.toml"), *words], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 600
        while not (run / "checkpoints" / "step-00001").is_dir():
            assert begun.poll() is None, begun.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.stop()
        _, complaint = begun.communicate(timeout=600)
        assert begun.returncode == 1
        assert re.search(r"^palestra: .*the Tinker server at http", complaint, re.M)
        server.start()
        done = subprocess.run([*command, "--resume", str(run)], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.verify() == []
            assert ledger.committed_step() == 3
    finally:
        begun.kill()
        server.stop()
