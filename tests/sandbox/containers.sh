#!/usr/bin/env bash
# The sandbox tests on containers too, with podman, on a small Debian image that is made here: no image registry is asked.
set -euo pipefail
image=localhost/palestra-test
command -v podman debootstrap >/dev/null || apt-get install -qq -y podman debootstrap

if ! podman image exists "$image"; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3,procps bookworm "$root"
    tar -C "$root" -c . | podman import - "$image"
fi

# Inside another container, podman's own runtime and limits are often refused; these are what works there.
export PALESTRA_TEST_IMAGE=$image PALESTRA_TEST_ENGINE=podman PALESTRA_TEST_OPTIONS=
if ! podman run --rm --network none "$image" true 2>/dev/null; then
    PALESTRA_TEST_ENGINE="podman --runtime runc --cgroup-manager=cgroupfs"
    PALESTRA_TEST_OPTIONS="--ulimit nofile=20000:20000 --ulimit nproc=10000:10000"
fi
exec .venv/bin/pytest tests/sandbox tests/swe/bench/test_image.py "$@"
