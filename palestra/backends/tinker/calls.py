"""Calls to the server, and what becomes of those that fail: the key and the request are the user's to mend, the rest may pass."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import pydantic
import tinker

from palestra.errors import InfrastructureError, ModelError, UsageError

T = TypeVar("T")


class Line:
    """Where the server is, and how long to wait for it."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address, self.seconds = address, seconds

    @asynccontextmanager
    async def calling(self, what: str) -> AsyncIterator[None]:
        """Says in one line what went wrong while doing `what`."""
        server = f"the Tinker server at {self.address}"
        try:
            async with asyncio.timeout(self.seconds):
                yield
        except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
            raise UsageError(f"{server} rejects the key: {_line(error)}; set TINKER_API_KEY to a valid one") from None
        except (tinker.BadRequestError, tinker.NotFoundError, tinker.UnprocessableEntityError) as error:
            raise ModelError(f"{server} refuses to {what}: {_line(error)}") from None
        except (TimeoutError, tinker.APITimeoutError):
            raise InfrastructureError(
                f"{server} did not {what} within {self.seconds:g} s; see whether it is alive, or raise backend.seconds"
            ) from None
        except tinker.APIConnectionError as error:
            raise InfrastructureError(f"{server} cannot be reached to {what}: {_line(error)}") from None
        except tinker.TinkerError as error:
            raise InfrastructureError(f"{server} failed to {what}: {_line(error)}") from None
        except (pydantic.ValidationError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InfrastructureError(
                f"{server} gave an answer that makes no sense when asked to {what}: {_line(error)}"
            ) from None

    async def probe(self, key: str) -> None:
        """A dead or wrong address is found out at once, and not after the SDK's minutes of retries."""
        try:
            async with httpx.AsyncClient(timeout=min(self.seconds, 20.0)) as client:
                answer = await client.get(f"{self.address.rstrip('/')}/api/v1/healthz", headers={"X-API-Key": key})
        except httpx.HTTPError as error:
            raise UsageError(
                f"no Tinker server answers at {self.address}: {_line(error)}; start one, or mend backend.base_url"
            ) from None
        if answer.status_code in (401, 403):
            raise UsageError(f"the Tinker server at {self.address} rejects the key; set TINKER_API_KEY to a valid one")
        if answer.status_code == 404:
            raise UsageError(f"{self.address} is no Tinker server: it has no /api/v1/healthz; mend backend.base_url")

    async def unload(self, model_id: str, key: str) -> None:
        """Give back an adapter's place, which a server keeps only so many of. One that is gone will have forgotten anyway."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=10.0) as client:
                await client.post(
                    f"{self.address.rstrip('/')}/api/v1/unload_model", json={"model_id": model_id}, headers={"X-API-Key": key}
                )


async def in_background(function: Callable[[], T]) -> T:
    """Run a blocking call of the SDK in a daemon thread: should it hang for ever, this process can still end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not done.cancelled():
            method(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function())
        except BaseException as error:  # noqa: BLE001  # it is raised again where the result is awaited
            outcome = (done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is gone when nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, daemon=True, name="palestra-tinker").start()
    return await done


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 300 else f"{text[:300]}…"
