"""Groups of trajectories for tests: of several segments, failed, cut short, without spread."""

import random
from collections.abc import Sequence

from palestra.trajectory import Completion, Failure, Group, Segment, Stop, Trajectory


def segment(chance: random.Random, turns: int, vocabulary: int = 500) -> Segment:
    def tokens(most: int) -> list[int]:
        return [chance.randrange(vocabulary) for _ in range(chance.randint(1, most))]

    made = Segment()
    made.read(tokens(9))
    for _ in range(turns):
        written = tokens(6)
        made.wrote(Completion(written, [-3 * chance.random() for _ in written], [0] * len(written), "stop"))
        made.read(tokens(4))  # the last ones teach nothing
    return made


def trajectory(task_id: str, index: int, segments: Sequence[Segment], reward: float | None, stop: Stop = "finish") -> Trajectory:
    failure = Failure("run", "infrastructure", "the line went dead") if reward is None else None
    return Trajectory(task_id, index, segments=list(segments), stop=stop, reward=reward, failure=failure)


def groups(seed: int) -> list[Group]:
    """Eight attempts at each of six tasks: ordinary ones, and everything that can be odd about a group."""
    chance = random.Random(seed)

    def attempts(task_id: str, rewards: Sequence[float | None], stops: Sequence[Stop] = ("finish",) * 8) -> Group:
        made = [
            trajectory(task_id, index, [segment(chance, chance.randint(1, 3)) for _ in range(chance.randint(1, 3))], reward, stop)
            for index, (reward, stop) in enumerate(zip(rewards, stops, strict=True))
        ]
        return Group(task_id, tuple(made))

    def some() -> list[float]:
        return [round(chance.random(), 3) for _ in range(8)]

    unread = attempts("one never wrote", some())
    unread.trajectories[3].segments = [Segment([1, 2, 3], [False] * 3, [0.0] * 3, [-1] * 3)]
    return [
        attempts("ordinary", some()),
        attempts("some failed", [None, *some()[:6], None]),
        attempts("no spread", [1.0] * 8),
        attempts("all but one failed", [None] * 7 + [1.0]),
        attempts("some were cut", some(), ("finish", "context") * 4),
        unread,
    ]
