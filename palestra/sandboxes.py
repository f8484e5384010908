"""The sandboxes of a run, for tasks: `await stack.enter_async_context(sandboxes.open(snapshot))` in `setup` and in `score`.
Which provider stands behind it, the config says.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar

from palestra.errors import UsageError
from palestra.protocols import Sandbox, Sandboxes, Snapshot, Spec

__all__ = ["Sandbox", "Snapshot", "Spec", "open", "provided", "snapshot"]

_provider: ContextVar[Sandboxes] = ContextVar("sandboxes")


async def snapshot(spec: Spec, setup: Callable[[Sandbox], Awaitable[object]] | None = None) -> Snapshot:
    """The state after the spec's commands, then `setup`. Built once, in `prepare` say; later calls find it."""
    return await _current().snapshot(spec, setup)


def open(snapshot: Snapshot | None = None) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox that starts from a snapshot, or empty. Leaving the block ends and forgets all that is in it."""
    return _current().open(snapshot or Snapshot())


@asynccontextmanager
async def provided(provider: Sandboxes) -> AsyncIterator[None]:
    """Within the block, and the asyncio tasks begun in it, sandboxes come from this provider. It is closed at the end."""
    token = _provider.set(provider)
    try:
        yield
    finally:
        _provider.reset(token)
        await provider.close()


def _current() -> Sandboxes:
    try:
        return _provider.get()
    except LookupError:
        raise UsageError("there is no provider of sandboxes here; run inside `async with sandboxes.provided(...)`") from None
