"""Random trajectories of one or more segments, as an agent would leave them."""

import random

from palestra.trajectory import Completion, Segment, Trajectory


def attempt(seed: int, index: int, reward: float, task_id: str = "t") -> Trajectory:
    chance = random.Random(seed)
    segments = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        segment = Segment()
        segment.read([chance.randrange(10, 99) for _ in range(chance.randint(1, 5))])
        for _ in range(chance.randint(1, 3)):
            count = chance.randint(1, 4)
            tokens = [chance.randrange(10, 99) for _ in range(count)]
            segment.wrote(Completion(tokens, [-chance.random() for _ in range(count)], [0] * count, "stop"))
            segment.read([chance.randrange(10, 99) for _ in range(chance.randint(0, 3))])
        segments.append(segment)
    return Trajectory(task_id, index, segments=segments, stop="finish", reward=reward)
