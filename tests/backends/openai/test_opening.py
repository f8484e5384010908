"""Whole commands against a real server that behaves, fails now and then, dies or rejects the key: one line and exit code 2 for
what the user can mend, and nothing lost of what was done."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from http_server import Answer, Asked, Fault, Said, chat, play, refusal, serving

from palestra.backends.openai import client as module
from palestra.cli import main
from palestra.config import WarmStart
from palestra.errors import ConfigError
from palestra.ledger import Ledger
from palestra.protocols import Renderer
from palestra.warm_start import load_samples

TASKS = '''
from dataclasses import dataclass

from palestra import Finish, Task, user


def done(answer: str) -> Finish:
    """Hand in."""
    return Finish(answer)


@dataclass(frozen=True)
class Row(Task[None, str]):
    def prompt(self, env):
        return [user(f"{self.id}: what is it?")]

    def tools(self, env):
        return [done]

    async def score(self, artifact, trajectory, stack):
        return float(artifact == "tea")


def heldout():
    return [Row(f"row-{number}") for number in range(12)]


def train():
    return [Row(f"train-{number}") for number in range(4)]
'''
RIGHT = chat(calls=[("done", '{"answer": "tea"}')])
KEY = "sk-very-secret"
ROOT = Path(__file__).parents[3]

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def _quick_and_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("MY_KEY", KEY)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "rows.py").write_text(TASKS)

    def run(verb: str, url: str, *overrides: str) -> int:
        values = {
            "run": {"folder": str(tmp_path / "run")},
            "tasks": {"heldout": "rows:heldout", "train": "rows:train"},
            "backend": {"kind": "openai", "base_url": url, "model": "m", "key_variable": "MY_KEY"},
            "training": {"steps": 1, "groups": 2, "samples": 2, "learning_rate": 1e-3},
            "dispatch": {"kind": "stream", "backoff": 0.01},
        }
        (tmp_path / "eval.toml").write_text(tomli_w.dumps(values))
        return main([verb, str(tmp_path / "eval.toml"), *overrides])

    return run


def served(answer: Answer) -> Answer:
    """A server with a list of its models."""
    listed = Said({"data": [{"id": "other"}, {"id": "m", "max_model_len": 5000}]})
    return lambda asked: listed if asked.path == "/v1/models" else answer(asked)


def said_once(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert KEY not in error
    return error


def test_an_evaluation_with_its_account(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(served(lambda _: RIGHT)) as server:
        assert run("eval", server.url, "backend.prices.input=2.0", "evaluation.samples=2") == 0
    assert all(asked.headers["Authorization"] == f"Bearer {KEY}" for asked in server.asked)
    summary = json.loads((tmp_path / "run" / "eval.1" / "summary.json").read_text())
    assert summary["pass@1"]["value"] == 1.0
    assert summary["usage"]["requests"] == 24
    assert summary["usage"]["prompt_tokens"] == 2400
    assert summary["usage"]["cost"] == pytest.approx(0.0048)
    assert "the server: 24 requests, 2,400 prompt tokens, 240 completion tokens, cost 0.0048" in capsys.readouterr().out
    with Ledger.open(tmp_path / "run" / "eval.1" / "ledger.sqlite", read_only=True) as ledger:
        [row, *_] = ledger.trajectories()
        assert row.trajectory.usage == row.trajectory.turns[0].usage
        assert ledger.verify() == []
    assert KEY not in (tmp_path / "run" / "eval.1" / "config.toml").read_text()


def test_nothing_is_learned_from_what_a_chat_server_said(run: Run, tmp_path: Path, renderer: Renderer) -> None:
    answer = chat(calls=[("done", '{"answer": "tea"}')], prompt_token_ids=[1, 2], token_ids=[3])
    with serving(served(lambda _: answer)) as server:
        assert run("eval", server.url, "backend.token_ids=true") == 0
    with Ledger.open(tmp_path / "run" / "eval.1" / "ledger.sqlite", read_only=True) as ledger:
        assert all(row.trajectory.segments[0].tokens == [1, 2, 3] for row in ledger.trajectories())
    with pytest.raises(ConfigError, match="gives no samples; no attempt with at least 1 has sampled tokens"):
        load_samples(WarmStart(data=tmp_path / "run" / "eval.1", steps=1), renderer)


def test_try_shows_one_task(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(served(lambda _: RIGHT)) as server:
        assert run("try", server.url) == 0
    assert "reward 1" in capsys.readouterr().out


def test_a_server_with_bad_moments_changes_nothing_but_the_account(run: Run, tmp_path: Path) -> None:
    number, lock = iter(range(10_000)), threading.Lock()

    def answer(asked: Asked) -> Said | Fault:
        with lock:
            moment = next(number) % 6
        faults: dict[int, Said | Fault] = {1: "die", 2: refusal(503), 4: refusal(429, Retry_After="0.01"), 5: Said(b"<html>")}
        return faults.get(moment, RIGHT)

    with serving(served(answer)) as server:
        assert run("eval", server.url, "dispatch.retries=20", "backend.prices.input=1.0") == 0
    summary = json.loads((tmp_path / "run" / "eval.1" / "summary.json").read_text())
    assert summary["pass@1"]["value"] == 1.0
    assert summary["failures"] == {}
    assert summary["usage"]["requests"] == 12
    assert summary["usage"]["retries"] > 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejected_key_is_one_line(run: Run, capsys: pytest.CaptureFixture[str], status: int) -> None:
    with serving(lambda _: refusal(status, f"bad key {KEY}")) as server:
        assert run("eval", server.url) == 2
    assert f"rejects the key in the environment variable MY_KEY ({status})" in said_once(capsys)


def test_a_key_that_is_rejected_later_is_one_line_too(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(served(lambda _: refusal(401))) as server:
        assert run("eval", server.url, "backend.concurrency=1") == 2
    assert "rejects the key in the environment variable MY_KEY (401)" in said_once(capsys)
    assert len(server.posts()) == 1


def test_a_server_that_dies_ends_the_run_and_the_rest_is_done_later(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alive, answered = True, 0

    def answer(asked: Asked) -> Said | Fault:
        nonlocal answered
        answered += alive
        return RIGHT if alive and answered <= 5 else "die"

    folder = tmp_path / "run" / "eval.1"
    with serving(served(answer)) as server:
        assert run("eval", server.url, "backend.patience=0.2", "backend.concurrency=2") == 2
        complaint = said_once(capsys)
        assert f"nothing comes from {server.url} any more" in complaint
        assert f"go on with: palestra eval --resume {folder}" in complaint
        with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.counts() == {"eval": {"evaluated": 5}}
        alive, answered, before = True, -1000, len(server.posts())
        assert main(["eval", "--resume", str(folder)]) == 0
        assert len(server.posts()) - before == 7
    assert json.loads((folder / "summary.json").read_text())["usage"]["requests"] == 12


def test_rollouts_that_failed_are_tried_again_on_resume(run: Run, tmp_path: Path) -> None:
    broken = True

    def answer(asked: Asked) -> Said:
        return refusal(400, "no such schema") if broken and "row-3:" in asked.body["messages"][0]["content"] else RIGHT

    folder = tmp_path / "run" / "eval.1"
    with serving(served(answer)) as server:
        assert run("eval", server.url, "dispatch.retries=0") == 0
        assert json.loads((folder / "summary.json").read_text())["failures"] == {"run/infrastructure": 1}
        broken, before = False, len(server.posts())
        assert main(["eval", "--resume", str(folder)]) == 0
    assert len(server.posts()) - before == 1
    assert json.loads((folder / "summary.json").read_text())["failures"] == {}


def test_what_a_failed_try_cost_is_not_forgotten(run: Run, tmp_path: Path) -> None:
    answer = play(chat(calls=[("nothing", "{}")]), Said(b"<html>"), RIGHT)
    with serving(served(answer)) as server:
        assert run("eval", server.url, "evaluation.tasks=1") == 0
    with Ledger.open(tmp_path / "run" / "eval.1" / "ledger.sqlite", read_only=True) as ledger:
        [row] = ledger.trajectories()
    assert [failure.kind for failure in row.trajectory.retried] == ["infrastructure"]
    assert "what is no JSON: '<html>'" in row.trajectory.retried[0].detail
    assert len(row.trajectory.turns) == 1
    assert row.trajectory.usage["requests"] == 2.0


def test_a_server_without_a_list_of_models_is_taken(run: Run) -> None:
    with serving(lambda asked: refusal(404) if asked.path == "/v1/models" else RIGHT) as server:
        assert run("eval", server.url) == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("backend.key_variable=NOT_SET_HERE",),
            "the environment variable NOT_SET_HERE is not set; export it with the server's key",
        ),
        ((f"backend.key_variable={KEY}",), "not the key itself"),
        (("backend.base_url=localhost:8000",), "give an address such as https://api.example.com/v1"),
        (("agent.context=6000",), "agent.context = 6000 is more than the 5000 tokens that http"),
        (("agent.seconds=60",), "backend.seconds + backend.patience = 420 is more than agent.seconds = 60"),
        (
            ("backend.omit=['temperature']", "sampling.temperature=0.0"),
            "sampling.temperature = 0.0: the backend 'openai' does not send it, as omit says; it must be 1.0",
        ),
        (("backend.mode=tokens",), 'mode = "tokens" needs backend.tokenizer'),
        (
            ("backend.mode=tokens", "backend.tokenizer=x", "backend.strict=true"),
            'backend.strict does not go with mode = "tokens"',
        ),
        (("backend.mode=tokens", "backend.tokenizer=x", "backend.extra.top_p=0.9"), "backend.extra does not go with mode"),
        (("backend.renderer=llama3",), 'backend.renderer does not go with mode = "chat"'),
        (("backend.extra.temperature=0.5",), "backend.extra.temperature: this field has a key of its own"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    run: Run, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], words: str
) -> None:
    with serving(served(lambda _: RIGHT)) as server:
        assert run("eval", server.url, *overrides) == 2
    assert words in said_once(capsys)
    assert server.posts() == []


def test_a_model_that_is_not_there_is_one_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(served(lambda _: refusal(404, "The model `m` does not exist."))) as server:
        assert run("eval", server.url) == 2
    assert "The model `m` does not exist.; correct backend.base_url (it mostly ends in /v1) or backend.model" in said_once(capsys)


def test_an_address_where_nothing_is_is_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.backends.openai.opening.FIRST_PATIENCE", 0.1)
    with serving(served(lambda _: RIGHT)) as server:
        url = server.url
    assert run("eval", url) == 2
    assert f"nothing comes from {url} any more" in said_once(capsys)


def test_the_readmes_command_evaluates_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^palestra eval (recipes/\S+ backend\.kind=openai (?:.*\\\n)*.*)$", readme, re.MULTILINE)
    recipe, *overrides = command.replace("\\\n", " ").split()
    assert "backend.key_variable=OPENAI_API_KEY" in overrides
    with serving(served(lambda _: chat(calls=[("finish", '{"answer": "1"}')]))) as server:
        here = (f"backend.base_url={server.url}", "backend.key_variable=MY_KEY", "evaluation.tasks=3", f"run.folder={tmp_path}")
        assert main(["eval", str(ROOT / recipe), *overrides, *here]) == 0
    assert [tool["function"]["name"] for tool in server.posts()[0].body["tools"]] == ["calculator", "finish"]
    assert "on 3 tasks" in capsys.readouterr().out


def test_training_is_refused_before_anything_is_asked(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(served(lambda _: RIGHT)) as server:
        assert run("train", server.url) == 2
    assert 'backend.kind = "openai" samples and cannot train: evaluate with it (palestra eval), or train with' in said_once(
        capsys
    )
    assert server.asked == []
