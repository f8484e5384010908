"""Dispatchers: strategies that decide which stage of which rollout runs now, all over the same staged rollout."""

from palestra import config
from palestra.dispatch.batch import Batch
from palestra.dispatch.bounded import Bounded
from palestra.dispatch.pipeline import Pipeline
from palestra.dispatch.stream import Stream
from palestra.protocols import Capacity, Dispatcher


def make(section: config.AnyDispatch, capacity: Capacity | None = None) -> Dispatcher:
    match section:
        case config.BatchDispatch():
            return Batch()
        case config.BoundedDispatch():
            return Bounded(section.slots)
        case config.PipelineDispatch():
            return Pipeline(section.init, section.run, section.reward, section.queue)
        case config.StreamDispatch():
            kv_tokens = None if capacity is None else max(1, int(section.kv_share * capacity.kv_tokens))
            return Stream(section.init, section.run, section.reward, section.runtimes or section.run + section.init, kv_tokens)
