"""Supervised samples from conversations in a file, and from another run's successes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from palestra.config import Loss, WarmStart, parse
from palestra.errors import ConfigError
from palestra.ledger import Ledger
from palestra.message import assistant, to_json, user
from palestra.protocols import Renderer
from palestra.report import Reporter
from palestra.runs import RunFolder
from palestra.trajectory import Completion, Failure, Key, Sample, Segment, Trajectory
from palestra.warm_start import load_samples, warm_start


def section(path: Path, **options: object) -> WarmStart:
    return WarmStart(data=path, steps=3, **options)  # type: ignore[arg-type]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def talk(*words: str) -> str:
    messages = [to_json(assistant(word) if place % 2 else user(word)) for place, word in enumerate(words)]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def test_only_what_the_assistant_says_is_trained_on(tmp_path: Path, renderer: Renderer) -> None:
    [sample] = load_samples(section(write(tmp_path / "a.jsonl", talk("hi", "hello", "bye", "see you"))), renderer)
    spoken = [token for token, trained in zip(sample.tokens, sample.mask, strict=True) if trained]
    assert renderer.decode(spoken) == "hello<|im_end|>see you<|im_end|>"
    opening = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(sample.tokens).startswith(opening)
    assert len(sample.tokens) == len(sample.mask) == len(sample.logprobs) == len(sample.versions)


def test_tools_stand_in_the_prompt(tmp_path: Path, renderer: Renderer) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    row = json.loads(talk("hi", "hello")) | {"tools": tools}
    [sample] = load_samples(section(write(tmp_path / "a.jsonl", json.dumps(row))), renderer)
    assert '"name": "look"' in renderer.decode(sample.tokens)


def test_a_line_ends_where_json_says_so(tmp_path: Path, renderer: Renderer) -> None:
    odd = "a\u2028b\u0085c\u000bd"
    path = write(tmp_path / "a.jsonl", talk("hi", odd), "", talk("ho", "hum") + "\r")
    first, _ = load_samples(section(path), renderer)
    assert odd.replace("\u000b", "\\u000b") in path.read_text(encoding="utf-8")
    assert odd in renderer.decode(first.tokens)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", ["line 2", "not a JSON object with `messages`"]),
        ("[1]", ["line 2", "not a JSON object with `messages`"]),
        ('{"message": []}', ["line 2", "KeyError('messages')"]),
        ('{"messages": ["hi"]}', ["line 2", "not a JSON object with `messages`"]),
        ('{"messages": [{"content": "hi"}]}', ["line 2", "KeyError('role')"]),
        ('{"messages": 7}', ["line 2", "not a JSON object with `messages`"]),
        ('{"messages": [{"role": "user", "content": "hi"}]}', ["line 2", "without a reply of the assistant"]),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, renderer: Renderer, line: str, words: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", talk("hi", "hello"), line)
    with pytest.raises(ConfigError) as error:
        load_samples(section(path), renderer)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: not a JSON object"):
        load_samples(section(tmp_path / "a.jsonl"), renderer)


@pytest.mark.parametrize("name", ["nothing.jsonl", "empty-folder"])
def test_what_is_missing_is_named(tmp_path: Path, renderer: Renderer, name: str) -> None:
    (tmp_path / "empty-folder").mkdir()
    with pytest.raises(
        ConfigError, match=rf"warm_start\.data = .*{name}': no such file; give a JSONL file or the folder of a run"
    ):
        load_samples(section(tmp_path / name), renderer)


def test_an_empty_file_gives_no_samples(tmp_path: Path, renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.data = .* gives no samples"):
        load_samples(section(write(tmp_path / "a.jsonl", "")), renderer)


# From a ledger


def ended(task: str, index: int, reward: float, segments: int = 1) -> Trajectory:
    trajectory = Trajectory(task, index, stop="finish", reward=reward)
    for number in range(segments):
        segment = Segment()
        segment.read([1, 2, 3 + number])
        segment.wrote(Completion([index, 7, 8], [-0.5, -0.25, -0.125], [4, 4, 5], "stop"))
        trajectory.segments.append(segment)
    return trajectory


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[Path]:
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        for index, reward in enumerate((0.0, 0.5, 1.0)):
            ledger.record(Key("train", 0, "a", index), ended("a", index, reward, segments=2))
        ledger.record(Key("train", 0, "b", 0), Trajectory("b", 0, failure=Failure("run", "bug", "x")))
        ledger.record(Key("eval", 0, "held", 0), ended("held", 0, 1.0))
        yield tmp_path


def test_successes_of_a_run_come_as_they_were_sampled(other_run: Path, renderer: Renderer) -> None:
    for path in (other_run, other_run / "ledger.sqlite"):
        samples = load_samples(section(path), renderer, heldout={"held"})
        expected = ended("a", 2, 1.0, segments=2).segments
        assert [(s.tokens, s.mask, s.logprobs, s.versions) for s in samples] == [
            (s.tokens, s.mask, s.logprobs, s.versions) for s in expected
        ]
    assert len(load_samples(section(other_run, min_reward=0.5), renderer, heldout={"held"})) == 4


def test_what_is_held_out_here_is_not_trained_on(other_run: Path, renderer: Renderer) -> None:
    assert len(load_samples(section(other_run), renderer)) == 3
    assert len(load_samples(section(other_run), renderer, heldout={"held"})) == 2
    with pytest.raises(ConfigError, match="gives no samples"):
        load_samples(section(other_run), renderer, heldout={"held", "a"})


# The steps


class Learner:
    """A trainer that only notes what it is told."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Sample]] = []
        self.losses: set[str] = set()
        self.rates: list[float] = []
        self.published = 0

    async def accumulate(self, samples: Sequence[Sample], loss: Loss) -> None:
        self.batches.append(samples)
        self.losses.add(loss.kind)

    async def step(self, learning_rate: float) -> dict[str, float]:
        self.rates.append(learning_rate)
        return {"loss": 1.0}

    async def publish(self) -> int:
        self.published += 1
        return 1


async def test_steps_of_cross_entropy_and_one_publication(
    tmp_path: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", *(talk("hi", str(number)) for number in range(5)))
    config = parse({"run": {"folder": str(tmp_path)}, "tasks": {"heldout": "a:b"}})
    learner = Learner()
    part = section(path, batch=4, learning_rate=0.5)
    await warm_start(part, learner, renderer, Reporter(config, RunFolder(tmp_path)))  # type: ignore[arg-type]
    assert [len(batch) for batch in learner.batches] == [4, 4, 4]
    assert all(len({tuple(sample.tokens) for sample in batch}) == 4 for batch in learner.batches)
    assert (learner.losses, learner.rates, learner.published) == ({"cross_entropy"}, [0.5] * 3, 1)
    assert capsys.readouterr().out.splitlines()[-1] == "warm start 3/3: loss 1.000"
