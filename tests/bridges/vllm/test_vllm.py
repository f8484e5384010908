"""Evaluation through a real vLLM server, by chat and by tokens: the same tokens, the same success, and logprobs that the embedded
backend computes too."""

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import palestra
from palestra import config, render, taskset
from palestra.backends.torch.opening import open_torch
from palestra.config import Torch
from palestra.errors import BackendError, ConfigError
from palestra.evaluation import Result
from palestra.ledger import Ledger
from palestra.message import ToolCall
from palestra.tool import Toolbox
from palestra.trajectory import Sample, Trajectory

RECIPE = Path(__file__).parents[3] / "recipes" / "bridges"


@dataclass(frozen=True)
class Evaluated:
    result: Result
    trajectories: dict[tuple[str, int], Trajectory]


@dataclass(frozen=True)
class Bridge:
    url: str
    model: Path
    folder: Path

    def evaluate(self, mode: str, *overrides: str) -> Evaluated:
        own = [f"backend.tokenizer={self.model}"] if mode == "tokens" else ["backend.token_ids=true"]
        result = palestra.evaluate(
            RECIPE / "openai.toml",
            f"run.folder={self.folder}",
            f"backend.base_url={self.url}",
            f"backend.mode={mode}",
            *own,
            *overrides,
            quiet=True,
        )
        return self._newest(result)

    def embedded(self, *overrides: str) -> Evaluated:
        where = (f"run.folder={self.folder}", f"backend.model={self.model}")
        return self._newest(palestra.evaluate(RECIPE / "train.toml", *where, *overrides, quiet=True))

    def _newest(self, result: Result) -> Evaluated:
        newest = max(self.folder.glob("eval.*"), key=lambda folder: int(folder.suffix[1:]))
        with Ledger.open(newest / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.verify() == []
            return Evaluated(result, ledger.finished("eval", 0))


@pytest.fixture(scope="module")
def bridge(server: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bridge:
    return Bridge(server, model, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def greedy(bridge: Bridge) -> dict[str, Evaluated]:
    cold = "sampling.temperature=0.0"
    return {"chat": bridge.evaluate("chat", cold), "tokens": bridge.evaluate("tokens", cold), "embedded": bridge.embedded(cold)}


@pytest.fixture(scope="module")
def sampled(bridge: Bridge) -> dict[str, Evaluated]:
    return {
        "chat": bridge.evaluate("chat"),
        "tokens": bridge.evaluate("tokens"),
        "tokens, other seed": bridge.evaluate("tokens", "run.seed=1"),
        "embedded": bridge.embedded(),
    }


def spoken(evaluated: Evaluated) -> dict[tuple[str, int], list[list[int]]]:
    """What stood in the context at the end of each reply."""
    return {
        key: [trajectory.segments[turn.segment].tokens[: turn.span[1]] for turn in trajectory.turns]
        for key, trajectory in evaluated.trajectories.items()
    }


def alike(one: Evaluated, other: Evaluated) -> float:
    """The share of attempts that are the same, token for token."""
    first, second = spoken(one), spoken(other)
    assert first.keys() == second.keys()
    return sum(first[key] == second[key] for key in first) / len(first)


def show(what: str, evaluations: dict[str, Evaluated]) -> None:
    """For whoever runs it with -s."""
    for name, evaluated in evaluations.items():
        same = alike(evaluated, evaluations["tokens"])
        print(f"{what}, {name}: {evaluated.result.success}, {same:.3f} as by tokens, {evaluated.result.seconds:.0f} s")


def test_everything_was_evaluated(greedy: dict[str, Evaluated], sampled: dict[str, Evaluated]) -> None:
    for evaluated in (*greedy.values(), *sampled.values()):
        assert evaluated.result.failures == {}
        assert len(evaluated.trajectories) == 240
    for through in ("chat", "tokens"):
        counted, done = sampled[through].result.usage, sampled[through].trajectories.values()
        assert counted["requests"] == sum(len(trajectory.turns) for trajectory in done)
        assert counted["uncounted"] == 0
    assert sampled["tokens"].result.usage["completion_tokens"] == sampled["tokens"].result.sampled_tokens


def test_greedy_gives_the_same_tokens_by_chat_and_by_tokens(greedy: dict[str, Evaluated]) -> None:
    show("greedy", greedy)
    assert alike(greedy["chat"], greedy["tokens"]) == 1.0
    assert greedy["chat"].result.success == greedy["tokens"].result.success


def test_greedy_is_the_embedded_backends_greedy(greedy: dict[str, Evaluated]) -> None:
    # Two tokens may be as likely as each other, to rounding.
    assert alike(greedy["tokens"], greedy["embedded"]) > 0.95


def test_sampled_success_agrees(sampled: dict[str, Evaluated]) -> None:
    show("sampled", sampled)
    rates = [evaluated.result.success for evaluated in sampled.values()]
    assert max(rate.low for rate in rates) <= min(rate.high for rate in rates)
    assert 0.1 < sampled["chat"].result.success.value < 0.9  # else agreeing would be easy


def test_the_same_seed_samples_the_same_tokens(sampled: dict[str, Evaluated]) -> None:
    assert alike(sampled["chat"], sampled["tokens"]) > 0.95
    assert alike(sampled["tokens"], sampled["tokens, other seed"]) < 0.9


@pytest.mark.parametrize("through", ["chat", "tokens"])
def test_the_server_saw_what_our_renderer_writes_at_every_turn(sampled: dict[str, Evaluated], model: Path, through: str) -> None:
    renderer = render.load(model)
    tasks = {task.id: task for task in taskset.load(config.load(RECIPE / "openai.toml").tasks, "heldout")}
    turns = 0
    for (task_id, _), trajectory in sampled[through].trajectories.items():
        env = asyncio.run(tasks[task_id].setup(None))
        expected = renderer.prompt(trajectory.openings[0], Toolbox(tasks[task_id].tools(env)).schemas())
        for turn in trajectory.turns:
            tokens, (start, end) = trajectory.segments[0].tokens, turn.span
            assert tokens[:start] == expected
            _assert_reads_alike(turn.message.calls, renderer.parse(tokens[start:end]).calls)
            expected = tokens[:end] + renderer.follow(turn.finish, turn.results)
            turns += 1
    assert turns > 300


def _assert_reads_alike(theirs: Sequence[ToolCall], ours: Sequence[ToolCall]) -> None:
    """A call that cannot be read is a fault for us and no call for vLLM's parser; else both read the same."""
    if theirs:
        assert [(call.name, call.arguments) for call in theirs] == [(call.name, call.arguments) for call in ours]
    else:
        assert all(call.fault for call in ours)


def test_chat_leaves_nothing_to_train_on(sampled: dict[str, Evaluated]) -> None:
    assert not any(any(segment.mask) for t in sampled["chat"].trajectories.values() for segment in t.segments)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_embedded_backends(bridge: Bridge, sampled: dict[str, Evaluated], temperature: float) -> None:
    evaluated = sampled["tokens"] if temperature == 1 else bridge.evaluate("tokens", f"sampling.temperature={temperature}")
    segments = [segment for trajectory in evaluated.trajectories.values() for segment in trajectory.segments]
    samples = [Sample(s.tokens, s.mask, s.logprobs, s.versions, 0.0) for s in segments]

    async def theirs() -> list[list[float]]:
        run = config.parse({"run": {"folder": "unused"}, "tasks": {"heldout": "task:heldout"}})
        section = Torch(model=str(bridge.model), dtype="float32", threads=1)
        async with open_torch(run, section, training=True) as (_, _, trainer):
            assert trainer is not None
            return await trainer.logprobs(samples, temperature)

    gaps = [
        abs(ours - other)
        for segment, logprobs in zip(segments, asyncio.run(theirs()), strict=True)
        for mask, ours, other in zip(segment.mask, segment.logprobs, logprobs, strict=True)
        if mask
    ]
    print(f"T = {temperature}: {len(gaps)} tokens, mean gap {sum(gaps) / len(gaps):.1e}, largest {max(gaps):.1e}")
    assert len(gaps) > 5000
    assert max(gaps) < 1e-3


def test_another_models_tokenizer_is_refused(bridge: Bridge, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bridges_make_model", RECIPE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    making = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(making)
    making.write_tokenizer(tmp_path / "other", [])
    with pytest.raises(ConfigError, match="reads the same text as other tokens; give the folder of the model that it serves"):
        bridge.evaluate("tokens", f"backend.tokenizer={tmp_path / 'other'}")


def test_a_context_that_the_server_does_not_take_is_refused(bridge: Bridge) -> None:
    with pytest.raises(ConfigError, match=r"agent\.context = 4096 is more than the 512 tokens"):
        bridge.evaluate("chat", "agent.context=4096")


def test_logprobs_before_temperature_are_refused(
    raw_server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "right")
    bridge = Bridge(raw_server, model, tmp_path)
    few = ("backend.key_variable=MY_KEY", "evaluation.tasks=8")
    with pytest.raises(ConfigError, match=r"temperature = 0\.7: the logprobs of .* --logprobs-mode processed_logprobs"):
        bridge.evaluate("tokens", "sampling.temperature=0.7", *few)
    assert len(bridge.evaluate("tokens", *few).trajectories) == 8  # at temperature 1 they are the same
    monkeypatch.setenv("MY_KEY", "wrong")
    with pytest.raises(BackendError, match=r"rejects the key in the environment variable MY_KEY \(401\)"):
        bridge.evaluate("chat", *few)
