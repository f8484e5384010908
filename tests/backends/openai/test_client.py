"""The line to a server, against a real one that dies, stalls, drips, rate-limits, talks nonsense and rejects the key."""

from asyncio import TaskGroup, sleep
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from time import monotonic, time

import pytest
from http_server import Answer, Fault, Said, Served, play, refusal, serving

from palestra.backends.openai import client as module
from palestra.backends.openai.client import Client, ContextFull, NotThere
from palestra.backends.openai.limits import Limits
from palestra.errors import BackendError, InfrastructureError

KEY = "sk-very-secret-0123456789"
FINE = Said({"fine": True})


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)


@asynccontextmanager
async def line(
    answer: Answer, seconds: float = 5.0, patience: float = 10.0, variable: str | None = "MY_KEY"
) -> AsyncIterator[tuple[Client, Served]]:
    with serving(answer) as served:
        async with Client(served.url, KEY if variable else None, variable, Limits(None, None), seconds, patience) as client:
            yield client, served


@pytest.mark.parametrize("fault", ["die", "cut", "stall", "drip", refusal(429), refusal(500), refusal(503), refusal(529)])
async def test_what_may_mend_itself_is_tried_again(fault: Fault | Said) -> None:
    async with line(play(fault, fault, FINE), seconds=0.3) as (client, served):
        answer = await client.post("/chat/completions", {"a": "\ud800"})
    assert answer.body == {"fine": True}
    assert answer.tries == 3
    assert [asked.body for asked in served.asked] == [{"a": "\ud800"}] * 3
    assert served.asked[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("value", ["0.5", "date"])
async def test_the_pause_that_the_server_asks_for_is_kept_by_all(value: str) -> None:
    # A date has whole seconds: two from now may be little more than one.
    header = formatdate(time() + 2, usegmt=True) if value == "date" else value
    async with line(play(refusal(429, Retry_After=header), FINE)) as (client, served):
        assert (await client.post("/x", {})).tries == 2
        started = served.asked[0].at
        assert served.asked[1].at - started >= (0.9 if value == "date" else 0.5)


async def test_others_wait_too_while_the_server_wants_a_pause() -> None:
    async with line(play(refusal(429, Retry_After="0.4"), FINE)) as (client, served), TaskGroup() as group:
        group.create_task(client.post("/x", {}))
        await sleep(0.2)  # by then the first one has been refused
        group.create_task(client.post("/y", {}))
    first, *others = [asked.at for asked in served.asked]
    assert len(others) == 2
    assert all(at - first >= 0.4 for at in others)


async def test_a_pause_beyond_our_patience_is_not_waited_for() -> None:
    started = monotonic()
    async with line(play(FINE, refusal(429, "slow down", Retry_After="3600"), FINE), patience=5.0) as (client, _):
        await client.post("/x", {})
        with pytest.raises(BackendError, match="1 tries; the last: 429: slow down"):
            await client.post("/x", {})
    assert monotonic() - started < 60


async def test_a_server_that_is_gone_ends_the_run() -> None:
    with serving(play(FINE)) as served:
        url = served.url
    async with Client(url, None, None, Limits(None, None), 5.0, 0.1) as client:
        with pytest.raises(BackendError, match=rf"nothing comes from {url} any more .*ConnectError"):
            await client.post("/x", {})


async def test_a_request_that_alone_gets_no_answer_stays_with_its_rollout() -> None:
    def answer(asked: object) -> Said | Fault:
        return "stall" if asked.path.endswith("/bad") else FINE  # type: ignore[attr-defined]

    async with line(answer, seconds=0.2, patience=0.3) as (client, _):

        async def others() -> None:
            while True:
                await client.post("/good", {})
                await sleep(0.02)

        async with TaskGroup() as group:
            running = group.create_task(others())
            with pytest.raises(
                InfrastructureError, match=r"no answer in \d tries; the last: no answer within backend.seconds = 0.2"
            ):
                await client.post("/bad", {})
            running.cancel()


@pytest.mark.parametrize("status", [401, 403])
async def test_a_rejected_key_is_said_once_and_never_repeated(status: int) -> None:
    async with line(play(refusal(status, f"Incorrect API key {KEY}"))) as (client, served):
        for _ in range(3):
            with pytest.raises(BackendError) as caught:
                await client.post("/x", {})
            assert f"rejects the key in the environment variable MY_KEY ({status})" in str(caught.value)
            assert KEY not in str(caught.value)
    assert len(served.asked) == 1


async def test_a_server_that_wants_a_key_where_none_is_named() -> None:
    async with line(play(refusal(401)), variable=None) as (client, served):
        with pytest.raises(BackendError, match="name the environment variable that holds it"):
            await client.post("/x", {})
    assert "Authorization" not in served.asked[0].headers


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (refusal(402, "pay"), BackendError, "402: pay; the account has no credit left"),
        (refusal(429, "quota", "insufficient_quota"), BackendError, "the account has no credit left"),
        (refusal(404, "no such model"), NotThere, r"404: no such model; correct backend.base_url .* or backend.model"),
        (refusal(307, "", Location="http://elsewhere/v1"), BackendError, "redirects to http://elsewhere/v1"),
        (refusal(400, "bad schema"), InfrastructureError, "answered 400: bad schema"),
        (refusal(422, "bad"), InfrastructureError, "answered 422: bad"),
        (refusal(400, "x", "context_length_exceeded"), ContextFull, "answered 400"),
        (refusal(400, "This model's maximum context length is 8 tokens."), ContextFull, "maximum context length"),
        (Said(b"<html>Bad gateway</html>", 400), InfrastructureError, "400: <html>Bad gateway</html>"),
        (Said(b"<html>hello</html>"), InfrastructureError, "no JSON: '<html>hello</html>'"),
        (Said(b""), InfrastructureError, "no JSON: ''"),
        (Said(b"\xff\xfe\x00"), InfrastructureError, "no JSON"),
        (Said(b"[" * 100_000), InfrastructureError, "no JSON"),
        (Said([1]), InfrastructureError, r"no JSON object: '\[1\]'"),
        (Said(b"no gzip", 200, {"Content-Encoding": "gzip"}), InfrastructureError, "cannot be understood: DecodingError"),
    ],
)
async def test_what_another_try_would_not_mend_is_asked_once(said: Said, error: type[Exception], words: str) -> None:
    async with line(play(said)) as (client, served):
        with pytest.raises(error, match=words):
            await client.post("/x", {})
    assert len(served.asked) == 1
