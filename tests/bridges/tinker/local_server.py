"""SkyRL's server with the recipe's tiny model, as a process that tests start and kill."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

RECIPE = Path(__file__).parents[3] / "recipes" / "bridges"


@dataclass
class Server:
    model: Path
    state: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "palestra.backends.tinker.serving", "--model", str(self.model)]
        command += ["--state", str(self.state), "--port", str(self.port)]
        self.state.mkdir(exist_ok=True)
        with (self.state / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        for _ in range(600):
            assert self.process.poll() is None, (self.state / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.address}/api/v1/healthz", timeout=5).read()
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError("the server did not come up")

    def stop(self) -> None:
        """With its engine, and at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
