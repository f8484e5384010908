"""The line to an OpenAI-compatible server: one request, tried again while that may help, and errors sorted by who can mend them.

A server that is silent, slow, busy or broken is asked again. A key that it rejects, a model that it has not and an account that
is empty end the run; anything else stays with the rollout that asked.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NoReturn

import httpx2

from palestra.backends.openai.limits import Limits
from palestra.errors import BackendError, InfrastructureError
from palestra.message import JSON

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second try, and at most before any further one; each is twice the one before."""

BUSY = {408, 409, 425, 429}
CONTEXT_FULL = ("context_length_exceeded", "maximum context length", "context window", "context size")


class ContextFull(InfrastructureError):
    """The conversation is longer than the server takes."""


class NotThere(BackendError):
    """The server has no such path or model."""


class _Unwell(Exception):
    """A failure that another try may mend, and the pause that the server asked for."""

    def __init__(self, what: str, pause: float | None = None) -> None:
        super().__init__(what)
        self.pause = pause


@dataclass(frozen=True, slots=True)
class Answer:
    body: dict[str, JSON]
    tries: int


class Client:
    """Use it as a context manager, in one event loop."""

    def __init__(
        self, base_url: str, key: str | None, key_variable: str | None, limits: Limits, seconds: float, patience: float
    ) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        # The time limit is for the whole answer; httpx's own are for each of its bytes.
        self._http = httpx2.AsyncClient(headers=headers, timeout=None, limits=unlimited)
        self._key_variable, self._limits, self._seconds, self._patience = key_variable, limits, seconds, patience
        self._rejected: BackendError | None = None
        self._heard = time.monotonic()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, patience: float) -> Answer:
        return await self._ask("GET", path, None, patience)

    async def post(self, path: str, body: Mapping[str, JSON]) -> Answer:
        answer = await self._ask("POST", path, json.dumps(body).encode(), self._patience)
        counted = answer.body.get("usage")
        total = counted.get("total_tokens") if isinstance(counted, dict) else None
        self._limits.spend_tokens(total if isinstance(total, int) else 0)
        return answer

    async def _ask(self, method: str, path: str, content: bytes | None, patience: float) -> Answer:
        tries, asked, give_up = 0, time.monotonic(), float("inf")
        while True:
            if self._rejected is not None:
                raise self._rejected
            await self._limits.admit()
            tries += 1
            try:
                return Answer(await self._once(method, path, content), tries)
            except _Unwell as failure:
                give_up = min(give_up, time.monotonic() + patience)
                pause = _pause(tries, failure.pause)
                if time.monotonic() + pause > give_up:
                    self._give_up(asked, tries, failure)
                if failure.pause:
                    self._limits.hold(failure.pause)
                await asyncio.sleep(pause)

    async def _once(self, method: str, path: str, content: bytes | None) -> dict[str, JSON]:
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._http.request(method, self.base_url + path, content=content)
        except TimeoutError:
            raise _Unwell(f"no answer within backend.seconds = {self._seconds:g}") from None
        except httpx2.TransportError as error:
            raise _Unwell(f"{type(error).__name__}: {error}") from None
        except httpx2.RequestError as error:
            raise InfrastructureError(f"{self.base_url} cannot be understood: {type(error).__name__}: {error}") from None
        if response.status_code == 200:
            self._heard = time.monotonic()
            return self._read(response)
        raise self._complaint(response)

    def _read(self, response: httpx2.Response) -> dict[str, JSON]:
        try:
            body = response.json()
        except (ValueError, RecursionError):
            raise InfrastructureError(f"{self.base_url} answered what is no JSON: {_start(response.text)!r}") from None
        if not isinstance(body, dict):
            raise InfrastructureError(f"{self.base_url} answered no JSON object: {_start(response.text)!r}")
        return body

    def _complaint(self, response: httpx2.Response) -> Exception:
        status, message, code = response.status_code, *_error(response)
        said = f"{self.base_url} answered {status}: {message}"
        if status in (401, 403):
            self._rejected = BackendError(self._about_key(status))
            return self._rejected
        if status == 402 or code == "insufficient_quota":
            return BackendError(f"{said}; the account has no credit left")
        if status in BUSY or status >= 500:
            return _Unwell(f"{status}: {message}", _retry_after(response))
        self._heard = time.monotonic()
        if status == 404:
            return NotThere(f"{said}; correct backend.base_url (it mostly ends in /v1) or backend.model")
        if 300 <= status < 400:
            return BackendError(f"{said}; it redirects to {response.headers.get('location')}: set backend.base_url to that")
        if code == "context_length_exceeded" or any(words in message.lower() for words in CONTEXT_FULL):
            return ContextFull(said)
        return InfrastructureError(said)

    def _about_key(self, status: int) -> str:
        if self._key_variable is None:
            return f"{self.base_url} wants a key ({status}); name the environment variable that holds it in backend.key_variable"
        return (
            f"{self.base_url} rejects the key in the environment variable {self._key_variable} ({status}); put a valid one there"
        )

    def _give_up(self, asked: float, tries: int, failure: _Unwell) -> NoReturn:
        if self._heard < asked:  # nobody else was answered meanwhile either
            raise BackendError(f"nothing comes from {self.base_url} any more ({tries} tries; the last: {failure})") from None
        raise InfrastructureError(f"{self.base_url} gave no answer in {tries} tries; the last: {failure}") from None


def _pause(tries: int, asked_for: float | None) -> float:
    """Back-off, with jitter so that those who failed together do not come back together."""
    if asked_for is not None:
        return asked_for * random.uniform(1.0, 1.1)
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (tries - 1)) * random.uniform(0.5, 1.0)


def _retry_after(response: httpx2.Response) -> float | None:
    """The header holds seconds, or a date."""
    value = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _error(response: httpx2.Response) -> tuple[str, str]:
    """What the server says is wrong, and its code for that."""
    try:
        error = response.json()["error"]
        return _start(str(error["message"])), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _start(response.text), ""


def _start(text: str) -> str:
    return " ".join(text.split())[:300]
