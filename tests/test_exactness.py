"""At every turn of every trajectory, the tokens sent to the sampler are the beginning of the tokens that are trained on.

Random replies (canonical or not, cut, malformed, with several calls, unknown tools, errors, context rewrites) go through the
real loop and policy, for every renderer family. The same checker has to catch policies that re-encode or re-render text.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playing import calling

from palestra import agent, render
from palestra.advantage import credit
from palestra.agent import Limits
from palestra.collect import Collector, group_of
from palestra.dispatch.bounded import Bounded
from palestra.errors import ToolError
from palestra.ledger import Ledger
from palestra.message import JSON, Message, user
from palestra.pace import Pace
from palestra.policy import TokenPolicies, TokenPolicy
from palestra.protocols import Capacity, Policy, Renderer, Sampling, Session
from palestra.render.tokenizer import Own, Tokenizer
from palestra.render.tokenizer import load as load_tokenizer
from palestra.task import Task
from palestra.tool import Finish, Rewrite, Toolbox
from palestra.trajectory import Completion, Trajectory, Turn

MakeFolder = Callable[..., Path]

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tool_call>' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) }}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FAMILIES: dict[str, tuple[str, str, str | None, Literal["keep", "off"]]] = {
    "smollm2": ("smollm2", "hermes", None, "off"),
    "qwen3 off": ("qwen3", "qwen3", None, "off"),
    "qwen3 keep": ("qwen3", "qwen3", None, "keep"),
    "llama3": ("llama3", "llama3", None, "off"),
    "jinja": ("qwen3", "jinja", TEMPLATE, "off"),
}


@dataclass(frozen=True)
class Kit:
    renderer: Renderer
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def kit(request: pytest.FixtureRequest, make_folder: MakeFolder) -> Kit:
    markers, family, template, thinking = FAMILIES[request.param]
    folder = make_folder(markers, template)
    return Kit(render.load(folder, family, thinking), load_tokenizer(folder))


# The tools


def echo(text: str, times: int = 1) -> str:
    """Say it back.

    Args:
        text: what to say, e.g. <|im_end|>
        times: how often
    """
    return f"{text}<|im_end|>{{{{ 7 }}}}" * times


def refuse(why: str) -> str:
    """Never works."""
    raise ToolError(f"no: {why}")


def forget(keep: str) -> Rewrite:
    """Begin anew."""
    return Rewrite((user("Go on."), calling(("echo", {"text": keep})), Message("tool", keep, call_id="call_0", name="echo")))


def done(answer: str) -> Finish:
    """Hand in."""
    return Finish(answer)


TOOLS = (echo, refuse, forget, done)
PROMPT = [user("Begin <|im_end|>.")]


# What a model might write


@dataclass(frozen=True)
class Spoken:
    """Text and calls, as the family writes them; without `canonical` each letter is a token of its own."""

    message: Message
    canonical: bool
    keep: float
    """The part of it that was written before it was cut."""


@dataclass(frozen=True)
class Noise:
    """Any ids at all, also some outside the vocabulary."""

    ids: tuple[int, ...]
    stops: bool


@dataclass(frozen=True)
class Malformed:
    """Text in which markers count, as a model writes it that has lost its way."""

    text: str
    stops: bool


Reply = Spoken | Noise | Malformed

MALFORMED = [
    '<tool_call>{"name": "echo", "arguments": {"text": "x"</tool_call>',
    '<tool_call>{"name": "echo", "arguments": []}</tool_call><tool_call></tool_call>',
    '<tool_call>{"name": "echo", "arg',
    '{"name": "echo", "parameters": {"text": ',
    '<|python_tag|>{"name": "echo"}; {"name": "refuse", "parameters": {"why": 1}}',
    "<think>\nI think <tool_call>",
    "</think></tool_call></tool_response>",
    "<tool_call>" * 20,
]
words = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(["Paris", " weather", "<|im_end|>", "\ufffd", "ü\n"])
arguments = st.one_of(
    st.builds(lambda text: {"text": text}, words),
    st.builds(lambda text, times: {"text": text, "times": times}, words, st.integers(-1, 4) | words),
    st.builds(lambda why: {"why": why}, words),
    st.builds(lambda keep: {"keep": keep}, words),
)
KEYS = {"echo": "text", "refuse": "why", "forget": "keep", "done": "answer"}
right = st.tuples(st.sampled_from(["echo", "echo", "refuse", "forget", "done"]), words).map(
    lambda drawn: (drawn[0], {KEYS[drawn[0]]: drawn[1]})
)
wrong = st.tuples(st.sampled_from(["echo", "refuse", "forget", "lok", "ech"]), arguments)
spoken = st.builds(
    Spoken,
    st.builds(lambda text, calls: calling(*calls, text=text), words, st.lists(right | wrong, max_size=3)),
    st.booleans(),
    st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.5]),
)
noise = st.builds(Noise, st.lists(st.integers(0, 560), max_size=25).map(tuple), st.booleans())
malformed = st.builds(Malformed, st.sampled_from(MALFORMED), st.booleans())
replies = st.lists(st.one_of(spoken, spoken, noise, malformed), min_size=1, max_size=7)


def written(kit: Kit, reply: Reply) -> list[int]:
    """The tokens of a reply."""
    stop = [min(kit.renderer.stop_ids)]
    match reply:
        case Noise(ids, stops):
            return [*ids, *(stop if stops else [])]
        case Malformed(text, stops):
            return kit.tokenizer.encode([Own(text)]) + (stop if stops else [])
        case Spoken(message, canonical, keep):
            tokens = kit.renderer.reply(message)
            tokens = tokens if canonical else apart(kit, tokens)
            return tokens[: max(1, round(len(tokens) * keep))]


def apart(kit: Kit, tokens: Sequence[int]) -> list[int]:
    """The same text, letter by letter: what no tokenizer would give, and what a sampler may well write."""
    pieces = kit.tokenizer.cut(kit.renderer.decode(tokens))
    spelled: list[int] = []
    for piece in pieces:
        letters = [piece] if isinstance(piece, Own) else list(piece)
        spelled += [token for letter in letters for token in kit.tokenizer.encode([letter])]
    return spelled


# The sampler that plays them, and remembers what it was sent


@dataclass
class Recorder:
    replies: Sequence[Sequence[int]]
    sent: list[list[int]] = field(default_factory=list)
    wrote: list[Completion] = field(default_factory=list)

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        self.sent.append(list(tokens))  # a copy: the list grows
        reply = list(self.replies[len(self.wrote) % len(self.replies)])
        end = next((place + 1 for place, token in enumerate(reply) if token in sampling.stop_ids), len(reply))
        reply = reply[: min(end, sampling.max_tokens)]
        stopped = bool(reply) and reply[-1] in sampling.stop_ids
        turn = len(self.wrote) + 1
        # Every token has a logprob and a version of its own, so that a shift by one place shows.
        logprobs = [-float(turn) - place / 1024 for place in range(len(reply))]
        versions = [turn * 1000 + place for place in range(len(reply))]
        self.wrote.append(Completion(reply, logprobs, versions, "stop" if stopped else "length"))
        return self.wrote[-1]


def check(trajectory: Trajectory, recorder: Recorder, renderer: Renderer) -> None:
    """Everything that exactness means, told from the sampler's side."""
    assert len(trajectory.turns) == len(recorder.wrote) == len(recorder.sent)
    expected = [
        ([False] * len(segment.tokens), [0.0] * len(segment.tokens), [-1] * len(segment.tokens))
        for segment in trajectory.segments
    ]
    for turn, sent, completion in zip(trajectory.turns, recorder.sent, recorder.wrote, strict=True):
        segment, (start, end) = trajectory.segments[turn.segment], turn.span
        assert sent == segment.tokens[: len(sent)], "what was sent is not the beginning of what is trained on"
        assert start == len(sent), "the reply does not follow what was sent"
        assert segment.tokens[start:end] == list(completion.tokens), "what was written is not what is trained on"
        mask, logprobs, versions = expected[turn.segment]
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = completion.logprobs
        versions[start:end] = completion.versions
    for segment, (mask, logprobs, versions) in zip(trajectory.segments, expected, strict=True):
        assert segment.mask == mask, "the mask is not True exactly on what was written"
        assert segment.logprobs == logprobs, "a logprob does not stand at its token"
        assert segment.versions == versions, "a version does not stand at its token"
    assert trajectory.sampled_tokens == sum(len(completion.tokens) for completion in recorder.wrote)

    numbers = [turn.segment for turn in trajectory.turns]
    assert numbers == sorted(numbers)
    assert len(trajectory.openings) == len(trajectory.segments)
    for turn, following in itertools.pairwise(trajectory.turns):
        if following.segment == turn.segment:
            between = trajectory.segments[turn.segment].tokens[turn.span[1] : following.span[0]]
            assert between == renderer.follow(turn.finish, turn.results), "between two replies stands not what was observed"


MakePolicy = Callable[[Session, Renderer, Sampling, int], Policy]


def run(
    kit: Kit,
    said: Sequence[Sequence[int]],
    turns: int = 6,
    context: int = 100_000,
    max_tokens: int = 400,
    make: MakePolicy = TokenPolicy,
    tools: Sequence[Callable[..., object]] = TOOLS,
) -> tuple[Trajectory, Recorder]:
    recorder, trajectory = Recorder(said), Trajectory("t", 0)
    policy = make(recorder, kit.renderer, Sampling(max_tokens=max_tokens), context)
    asyncio.run(agent.run(policy, PROMPT, Toolbox(tools), Limits(turns, 60.0), trajectory))
    return trajectory, recorder


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(replies, st.sampled_from([100_000, 2500, 1500]), st.sampled_from([400, 12, 1]))
def test_what_is_sent_is_what_is_trained_on(kit: Kit, said: list[Reply], context: int, max_tokens: int) -> None:
    trajectory, recorder = run(kit, [written(kit, reply) for reply in said], 6, context, max_tokens)
    check(trajectory, recorder, kit.renderer)
    for turn in trajectory.turns:
        assert turn.span[1] <= context
        assert turn.span[1] - turn.span[0] <= max_tokens


def test_every_kind_of_turn_is_exact_and_was_there(kit: Kit) -> None:
    """One fixed run that has it all, so that the property above cannot pass by never getting anywhere."""
    several = calling(("echo", {"text": "a"}), ("refuse", {"why": "b"}), ("lok", {}), text="I look.")
    said: list[Reply] = [
        Spoken(several, False, 1.0),
        Spoken(calling(("echo", {"text": "weather " * 9})), True, 0.5),
        Spoken(calling(("echo", {"text": "again"}), ("forget", {"keep": "Paris"}), ("done", {"answer": "no"})), True, 1.0),
        Noise(tuple(range(5, 60)), False),
        Spoken(calling(("done", {"answer": "yes"})), False, 1.0),
    ]
    trajectory, recorder = run(kit, [written(kit, reply) for reply in said])
    check(trajectory, recorder, kit.renderer)
    assert (trajectory.stop, trajectory.answer) == ("finish", "yes")
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 0, 1, 1]
    assert [turn.finish for turn in trajectory.turns] == ["stop", "length", "stop", "length", "stop"]
    assert [len(trajectory.turns[place].message.calls) for place in (0, 2, 3, 4)] == [3, 3, 0, 1]
    assert [result.text[:6] for result in trajectory.turns[0].results][1:] == ["Error:", "Error:"]
    first = trajectory.turns[0].span
    text = kit.renderer.decode(trajectory.segments[0].tokens[slice(*first)])
    assert trajectory.segments[0].tokens[slice(*first)] != kit.tokenizer.encode([Own(text)]), "the reply was to be non-canonical"


def test_fifty_turns_and_more_than_32_000_tokens(kit: Kit) -> None:
    chance = random.Random(0)

    def read(page: str) -> str:
        """Read a page."""
        return " ".join(chance.choice(["weather", "Paris", "rain", "<|im_end|>", "ü", "functions"]) for _ in range(320))

    spelled = [apart(kit, kit.renderer.reply(calling(("read", {"page": str(page)}), text="Next."))) for page in range(49)]
    spelled.append(kit.renderer.reply(calling(("done", {"answer": "read"}))))
    trajectory, recorder = run(kit, spelled, turns=50, context=200_000, tools=[read, done])
    check(trajectory, recorder, kit.renderer)
    assert (trajectory.stop, len(trajectory.turns), len(trajectory.segments)) == ("finish", 50, 1)
    assert len(trajectory.segments[0].tokens) >= 32_000


# Policies that are wrong, and must be caught


class Reencoding(TokenPolicy):
    """Decodes what was written, and encodes it again, as whoever keeps messages and not tokens does."""

    encode: Callable[[str], list[int]]

    async def act(self) -> Turn | None:
        turn = await super().act()
        assert turn is not None
        segment, (start, end) = self.segments[turn.segment], turn.span
        again = self.encode(self._renderer.decode(segment.tokens[start:end]))
        segment.tokens[start:] = again
        segment.mask[start:] = [True] * len(again)
        segment.logprobs[start:] = (segment.logprobs[start:] + [0.0] * len(again))[: len(again)]
        segment.versions[start:] = (segment.versions[start:] + [0] * len(again))[: len(again)]
        return replace(turn, span=(start, start + len(again)))


class Rerendering(TokenPolicy):
    """Keeps exact tokens to train on, but sends the conversation as rendered anew each turn."""

    async def begin(self, messages: Sequence[Message], tools: Sequence[dict[str, JSON]]) -> None:
        self.said, self.tools = list(messages), tools
        await super().begin(messages, tools)

    async def act(self) -> Turn | None:
        segment = self.segments[-1]
        completion = await self._session.sample(self._renderer.prompt(self.said, self.tools), self._sampling)
        self._finish = completion.finish
        message = self._renderer.parse(completion.tokens)
        self.said.append(message)
        return Turn(message, completion.finish, len(self.segments) - 1, segment.wrote(completion))

    async def observe(self, messages: Sequence[Message]) -> None:
        self.said += messages
        await super().observe(messages)


class TrainingOnResults(TokenPolicy):
    """Exact tokens, but the mask covers what the tools said."""

    async def observe(self, messages: Sequence[Message]) -> None:
        before = len(self.segments[-1])
        await super().observe(messages)
        mask = self.segments[-1].mask
        mask[before:] = [True] * (len(mask) - before)


class ShiftedLogprobs(TokenPolicy):
    """Logprobs one place too early."""

    async def act(self) -> Turn | None:
        turn = await super().act()
        logprobs = self.segments[-1].logprobs
        logprobs[:] = [*logprobs[1:], 0.0]
        return turn


class LastMessageOnly(TokenPolicy):
    """Observes only the last of several results."""

    async def observe(self, messages: Sequence[Message]) -> None:
        await super().observe(messages[-1:])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (Reencoding, "what was written is not what is trained on"),
        (Rerendering, "what was sent is not the beginning of what is trained on"),
        (TrainingOnResults, "the mask is not True exactly on what was written"),
        (ShiftedLogprobs, "a logprob does not stand at its token"),
        (LastMessageOnly, "between two replies stands not what was observed"),
    ],
)
def test_a_policy_that_is_not_exact_is_caught(kit: Kit, wrong: type[TokenPolicy], complaint: str) -> None:
    if issubclass(wrong, Reencoding):
        wrong.encode = staticmethod(lambda text: kit.tokenizer.encode([Own(text)]))
    two = Spoken(calling(("echo", {"text": "weather"}), ("echo", {"text": "Paris"})), False, 1.0)
    last = Spoken(calling(("done", {"answer": "yes"})), True, 1.0)
    said = [written(kit, reply) for reply in (two, last)]
    trajectory, recorder = run(kit, said)
    check(trajectory, recorder, kit.renderer)  # with the right policy this very run is exact
    trajectory, recorder = run(kit, said, make=wrong)
    assert len(recorder.wrote) == 2
    with pytest.raises(AssertionError, match=complaint):
        check(trajectory, recorder, kit.renderer)


# All the way to the samples, and through the ledger


@dataclass(frozen=True)
class Chat(Task[None, JSON]):
    def prompt(self, env: None) -> Sequence[Message]:
        return PROMPT

    def tools(self, env: None) -> Sequence[Callable[..., object]]:
        return TOOLS

    async def score(self, artifact: JSON, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return float(trajectory.index)


@dataclass
class RecordingSampler:
    kit: Kit
    recorders: dict[int, Recorder] = field(default_factory=dict)

    @property
    def capacity(self) -> Capacity | None:
        return None

    @asynccontextmanager
    async def session(self, seed: int, expected_tokens: int) -> AsyncIterator[Recorder]:
        chance = random.Random(seed)
        forget = written(self.kit, Spoken(calling(("forget", {"keep": str(seed)})), False, 1.0))
        noise = [[chance.randrange(500) for _ in range(30)] for _ in range(3)]
        self.recorders[seed] = Recorder([noise[0], forget, *noise[1:]])
        yield self.recorders[seed]


async def test_samples_and_the_ledger_hold_the_very_tokens(kit: Kit, tmp_path: Path) -> None:
    sampler = RecordingSampler(kit)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        policies = TokenPolicies(sampler, kit.renderer)
        collector = Collector(policies, lambda: Bounded(3), ledger, Limits(5, 60.0), 100_000, 0, tmp_path)
        async with collector.groups(iter([(0, [Chat("a")])]), 3, Pace(1, 1), Sampling()) as groups:
            group = group_of(await anext(groups))
        restored = list(ledger.finished("train", 0).values())
    for trajectory in (*group.trajectories, *restored):
        [recorder] = [r for r in sampler.recorders.values() if r.wrote[0].tokens == _first_written(trajectory)]
        check(trajectory, recorder, kit.renderer)
        assert len(trajectory.segments) == 2
    samples = credit(group, "grpo").samples
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    for sample, segment in zip(samples, segments, strict=True):
        end = len(sample.tokens)
        assert (sample.tokens, sample.mask) == (segment.tokens[:end], segment.mask[:end])
        assert (sample.logprobs, sample.versions) == (segment.logprobs[:end], segment.versions[:end])
        assert not any(segment.mask[end:]), "a sampled token is not trained on"


def _first_written(trajectory: Trajectory) -> list[int]:
    return trajectory.segments[0].tokens[slice(*trajectory.turns[0].span)]
