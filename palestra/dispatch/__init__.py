"""Dispatchers: strategies that decide which stage of which rollout runs now."""

from palestra.config import Dispatch
from palestra.dispatch.bounded import Bounded
from palestra.protocols import Dispatcher


def make(config: Dispatch) -> Dispatcher:
    return Bounded(config.slots)
