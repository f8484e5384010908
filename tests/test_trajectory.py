import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.message import Message, assistant, system, user
from palestra.trajectory import Completion, Segment, Span, Trajectory, Turn, now

token_lists = st.lists(st.integers(0, 99), max_size=4)


def completion(tokens: list[int], version: int = 0) -> Completion:
    return Completion(tokens, [-float(token) for token in tokens], [version] * len(tokens), "stop")


@pytest.mark.parametrize(("logprobs", "versions"), [([], [0]), ([-1.0], []), ([-1.0, -1.0], [0])])
def test_a_completion_has_one_logprob_and_version_for_each_token(logprobs: list[float], versions: list[int]) -> None:
    with pytest.raises(ValueError, match="one logprob and one version"):
        Completion([5], logprobs, versions, "stop")


def test_only_what_was_written_is_masked_in() -> None:
    segment = Segment()
    segment.read([1, 2])
    assert segment.wrote(completion([3, 4], version=7)) == (2, 4)
    segment.read([5])
    assert segment.wrote(completion([6], version=8)) == (5, 6)
    assert segment.tokens == [1, 2, 3, 4, 5, 6]
    assert segment.mask == [False, False, True, True, False, True]
    assert segment.logprobs == [0, 0, -3, -4, 0, -6]
    assert segment.versions == [-1, -1, 7, 7, -1, 8]
    assert len(segment) == 6


@given(st.lists(st.tuples(st.booleans(), token_lists), max_size=6))
def test_a_segment_only_grows_and_stays_aligned(steps: list[tuple[bool, list[int]]]) -> None:
    segment, written = Segment(), []
    for writes, tokens in steps:
        before = (list(segment.tokens), list(segment.mask), list(segment.logprobs), list(segment.versions))
        if writes:
            start, end = segment.wrote(completion(tokens))
            assert segment.tokens[start:end] == tokens
            written.extend(tokens)
        else:
            segment.read(tokens)
        after = (segment.tokens, segment.mask, segment.logprobs, segment.versions)
        assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))
        assert {len(column) for column in after} == {len(before[0]) + len(tokens)}
    assert [token for token, mask in zip(segment.tokens, segment.mask, strict=True) if mask] == written


def test_a_segment_keeps_its_own_copy_of_what_it_was_given() -> None:
    prompt = [1, 2]
    segment = Segment()
    segment.read(prompt)
    prompt.append(3)
    assert segment.tokens == [1, 2]


def test_messages_are_everything_said_in_order() -> None:
    def turn(text: str, segment: int, *results: Message) -> Turn:
        return Turn(assistant(text), "stop", segment, (0, 0), results)

    trajectory = Trajectory(
        "t",
        0,
        openings=[(system("s"), user("u")), (user("summary"),)],
        turns=[turn("a", 0, Message("tool", "r1"), Message("tool", "r2")), turn("b", 0), turn("c", 1)],
    )
    assert [message.text for message in trajectory.messages] == ["s", "u", "a", "r1", "r2", "b", "summary", "c"]


def test_sampled_tokens_counts_over_all_segments() -> None:
    first, second = Segment(), Segment()
    first.read([1])
    first.wrote(completion([2, 3]))
    second.wrote(completion([4]))
    assert Trajectory("t", 0, segments=[first, second]).sampled_tokens == 3


def test_seconds_are_summed_over_the_spans_of_each_stage() -> None:
    spans = [Span("init", 10.0, 12.0), Span("init", 13.0, 14.5), Span("sample", 15.0, 16.0), Span("tool", 16.0, 17.0)]
    trajectory = Trajectory("t", 0, spans=[*spans, Span("run", 14.5, 20.0), Span("reward", 20.0, 20.25)])
    assert trajectory.seconds == {"init": 3.5, "run": 5.5, "reward": 0.25}, "retries included, and what is within a run is not"
    assert Trajectory("t", 0).seconds == {}


def test_time_never_goes_backwards() -> None:
    times = [now() for _ in range(100)]
    assert times == sorted(times)
