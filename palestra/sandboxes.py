"""The sandboxes of a run, for tasks: `await stack.enter_async_context(sandboxes.open(snapshot))` in `setup` and in `score`.
Which provider stands behind it, the config says.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar

from palestra.errors import UsageError
from palestra.protocols import Sandbox, Sandboxes, Snapshot, Spec

__all__ = ["Sandbox", "Snapshot", "Spec", "open", "provided", "snapshot"]


async def snapshot(spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
    """The state after the spec's commands, then `setup`. Built once, in `prepare` say; later calls find it."""
    return await _current().snapshot(spec, setup)


def open(snapshot: Snapshot | None = None) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox that starts from a snapshot, or empty. Leaving the block ends and forgets all that is in it."""
    return _current().open(snapshot or Snapshot())


@asynccontextmanager
async def provided(make: Callable[[], Sandboxes]) -> AsyncIterator[None]:
    """Within the block, and in the asyncio tasks begun in it, sandboxes come from the provider that this makes. It is made when
    the first task asks, so that what needs none asks nothing of the machine."""
    ours = _Provided(make)
    token = _provided.set(ours)
    try:
        yield
    finally:
        _provided.reset(token)
        if ours.provider is not None:
            await ours.provider.close()


class _Provided:
    def __init__(self, make: Callable[[], Sandboxes]) -> None:
        self.make = make
        self.provider: Sandboxes | None = None


def _current() -> Sandboxes:
    ours = _provided.get(None)
    if ours is None:
        raise UsageError("there is no provider of sandboxes here; run inside `async with sandboxes.provided(...)`")
    if ours.provider is None:
        ours.provider = ours.make()
    return ours.provider


_provided: ContextVar[_Provided | None] = ContextVar("sandboxes", default=None)
