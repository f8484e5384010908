"""Trajectories as bytes and back. What people query by (reward, stop, the key) has its own columns; the rest is packed here."""

import json
from collections.abc import Iterable
from dataclasses import astuple

import numpy as np

from palestra.errors import TaskError
from palestra.message import JSON, from_json, to_json
from palestra.trajectory import Failure, Hint, Segment, Span, Stop, Trajectory, Turn

SegmentBytes = tuple[bytes, bytes, bytes, bytes]
"""Tokens, mask, logprobs, versions."""


def to_bytes(value: JSON) -> bytes:
    # Escapes would be valid UTF-8 always, but two lone surrogates side by side would come back as one character.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def from_bytes(data: bytes) -> JSON:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def pack(trajectory: Trajectory) -> bytes:
    """All that has no column and no segment of its own, as JSON."""
    body = {
        "openings": [[to_json(message) for message in opening] for opening in trajectory.openings],
        "turns": [_turn_to_json(turn) for turn in trajectory.turns],
        "hints": None if trajectory.hints is None else [astuple(hint) for hint in trajectory.hints],
        "answer": trajectory.answer,
        "artifact": trajectory.artifact,
        "metrics": trajectory.metrics,
        "usage": trajectory.usage,
        "failure": _failure_to_json(trajectory.failure),
        "spans": trajectory.spans,
        "retried": [_failure_to_json(failure) for failure in trajectory.retried],
    }
    try:
        return to_bytes(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"task {trajectory.task_id!r}: its answer, artifact and metrics must be JSON: {error}") from error


def unpack(
    task_id: str, index: int, reward: float | None, stop: Stop | None, body: bytes, segments: Iterable[SegmentBytes]
) -> Trajectory:
    value = from_bytes(body)
    return Trajectory(
        task_id=task_id,
        index=index,
        openings=[tuple(from_json(message) for message in opening) for opening in value["openings"]],
        segments=[_unpack_segment(segment) for segment in segments],
        turns=[_turn_from_json(turn) for turn in value["turns"]],
        hints=None if value["hints"] is None else [Hint(*hint) for hint in value["hints"]],
        stop=stop,
        answer=value["answer"],
        artifact=value["artifact"],
        reward=reward,
        metrics=value["metrics"],
        usage=value.get("usage", {}),  # ledgers of before have none
        failure=Failure(**value["failure"]) if value["failure"] else None,
        spans=[Span(*span) for span in value["spans"]],
        retried=[Failure(**failure) for failure in value["retried"]],
    )


def pack_segment(segment: Segment) -> SegmentBytes:
    """Logprobs are kept as float32, as samplers compute and trainers use them: a finer value comes back rounded."""
    return (
        np.asarray(segment.tokens, "<i4").tobytes(),
        np.asarray(segment.mask, np.bool_).tobytes(),
        np.asarray(segment.logprobs, "<f4").tobytes(),
        np.asarray(segment.versions, "<i4").tobytes(),
    )


def _unpack_segment(data: SegmentBytes) -> Segment:
    tokens, mask, logprobs, versions = data
    return Segment(
        np.frombuffer(tokens, "<i4").tolist(),
        np.frombuffer(mask, np.bool_).tolist(),
        np.frombuffer(logprobs, "<f4").tolist(),
        np.frombuffer(versions, "<i4").tolist(),
    )


def _turn_to_json(turn: Turn) -> JSON:
    return {
        "message": to_json(turn.message),
        "finish": turn.finish,
        "segment": turn.segment,
        "span": turn.span,
        "results": [to_json(message) for message in turn.results],
        "usage": dict(turn.usage),
    }


def _turn_from_json(value: JSON) -> Turn:
    start, end = value["span"]
    results = tuple(from_json(message) for message in value["results"])
    usage = value.get("usage", {})
    return Turn(from_json(value["message"]), value["finish"], value["segment"], (start, end), results, usage)


def _failure_to_json(failure: Failure | None) -> JSON:
    return failure and {"stage": failure.stage, "kind": failure.kind, "detail": failure.detail}
