"""How fast a server may be asked: requests and tokens a minute, and pauses that it asks for itself."""

import asyncio


def _now() -> float:
    return asyncio.get_running_loop().time()


class Rate:
    """So much a minute. What is spent is paid back with time; whoever comes meanwhile waits."""

    def __init__(self, per_minute: float | None) -> None:
        self._seconds_each = 60.0 / per_minute if per_minute else 0.0
        self._free_at = 0.0

    def spend(self, amount: float) -> None:
        self._free_at = max(self._free_at, _now()) + amount * self._seconds_each

    @property
    def wait(self) -> float:
        return self._free_at - _now()


class Limits:
    """The waits before a request. Tokens are known only from the answer, so they are kept to on average."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        self._requests, self._tokens = Rate(requests_per_minute), Rate(tokens_per_minute)
        self._held_until = 0.0

    async def admit(self) -> None:
        """Wait until one more request may be sent."""
        while (wait := self._wait()) > 0:  # noqa: ASYNC110  # time passes by itself
            await asyncio.sleep(wait)  # others may be first, so it may have to wait again
        self._requests.spend(1)

    def _wait(self) -> float:
        return max(self._requests.wait, self._tokens.wait, self._held_until - _now())

    def spend_tokens(self, count: float) -> None:
        self._tokens.spend(count)

    def hold(self, seconds: float) -> None:
        """The server asked for a pause: nobody asks it anything meanwhile."""
        self._held_until = max(self._held_until, _now() + seconds)
