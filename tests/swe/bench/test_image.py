"""The same instance from a container image in the shape of the official ones, which is made here: the repository with all its
history in /testbed, everybody may write there, and Python under /opt/miniconda3. The official images could not be had.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from palestra import sandboxes
from palestra.checking import check
from palestra.sandbox.container import Container
from palestra.swe.bench.instance import from_row
from palestra.swe.bench.runtime import Image
from palestra.swe.bench.task import Issue

IMAGE = os.environ.get("PALESTRA_TEST_IMAGE")
pytestmark = pytest.mark.skipif(not IMAGE, reason="PALESTRA_TEST_IMAGE names no container image to try")

ENGINE, OPTIONS = (os.environ.get(f"PALESTRA_TEST_{name}", "").split() for name in ("ENGINE", "OPTIONS"))
MADE = "localhost/palestra-testbed:latest"
MAKE = """set -e
apt-get update -qq && apt-get install -qq -y git python3-pytest > /dev/null
git clone -q /mirrors/maker__abacus /testbed && cd /testbed && git checkout -q $0
chmod -R 777 /testbed
bin=/opt/miniconda3/envs/testbed/bin
mkdir -p $bin && ln -s /usr/bin/python3 $bin/python && ln -s /usr/bin/pytest-3 $bin/pytest
echo /testbed > /usr/lib/python3/dist-packages/abacus.pth
"""


@pytest.fixture(scope="module")
def image(mirrors: Path, row: Mapping[str, object]) -> Iterator[str]:
    engine = ENGINE or ["podman"]
    run = [*engine, "run", "--network", "host", "--name", "palestra-testbed", "--volume", f"{mirrors}:/mirrors:ro", *OPTIONS]
    try:
        subprocess.run([*run, str(IMAGE), "bash", "-c", MAKE, str(row["base_commit"])], check=True)
        subprocess.run([*engine, "commit", "palestra-testbed", MADE], check=True, stdout=subprocess.DEVNULL)
    finally:
        subprocess.run([*engine, "rm", "--force", "palestra-testbed"], stdout=subprocess.DEVNULL)
    yield MADE
    subprocess.run([*engine, "rmi", "--force", MADE], stdout=subprocess.DEVNULL)


async def test_an_instance_in_its_image(tmp_path: Path, image: str, row: Mapping[str, object]) -> None:
    instance = from_row({**row, "docker_image": image, "environment_yml": None}, "here")
    issue = Issue(instance.id, instance, Image())
    async with sandboxes.provided(lambda: Container(str(IMAGE), engine=ENGINE, options=OPTIONS)):
        found = await check([issue], tmp_path, lambda _: None)
        assert (found["failures"], found["gold"], found["noop"]) == ({}, 1, 1)
        async with AsyncExitStack() as stack:
            bash = (await issue.setup(stack)).workspace.shell.bash
            assert (await bash("git rev-list --all --reflog | wc -l")).startswith("1\n")
            assert "ZeroDivisionError" in await bash("python -c 'import abacus; abacus.mean([])'")
