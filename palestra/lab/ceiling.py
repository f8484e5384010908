"""How fast any schedule could be on a workload's engine, counted from its jobs.

The physical limit counts decoding at full KV, and every prefilled token once. An engine that holds KV while it prefills, and
reserves it for a piece of a reply before it is written, needs more; still more if it prefills in whole chunks. So does one
whose contexts wait for tools: they keep their KV meanwhile, or are prefilled again.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from palestra.lab.workload import Engine, Job, Workload

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Shares of the physical limit."""

    bound: float
    """No schedule can exceed it: calls prefill and write their tokens, and hold their context and a piece of their reply
    meanwhile. Tools, tails and switches are for free, and so is publishing, beside which units may train."""
    with_tools: float
    """What is left with tools that take their time, were all of the engine's steps equally long, contexts evicted only for
    the length of their wait, and publishing at the cost of those units that generate, as many as keep pace with the others. It
    is no bound: a schedule whose tools wait just when many prefill could come above it."""


@dataclass(frozen=True, slots=True)
class _Calls:
    prefill: Column
    """Steps for what is new."""
    output: Column
    lost: Column
    """Steps to prefill it all again if KV is lost before the next call, with what is new then."""
    length: Column
    """Tokens of KV held until the next call."""
    reserve: Column
    """Tokens of KV held while it is prefilled."""
    written: Column
    """Tokens of KV held in each decode step, added up."""
    wait: Column
    """Seconds until the next call, if there is one."""
    next_prefill: Column
    next_reserve: Column


def ceiling(workload: Workload, seed: int, piece: int | None = None, count: int | None = None) -> Ceiling:
    """Of the workload's steps, or so many, with replies that reserve KV for so many tokens at a time, or whole."""
    count = workload.batch.steps if count is None else count
    steps = [workload.draw(seed, step) for step in range(count)]
    limit = sum(workload.limits(jobs).step for jobs in steps)
    training, publishing = (count * seconds for seconds in (workload.training.seconds, workload.training.publish_seconds))
    calls = _calls(workload, chain.from_iterable(steps), piece)
    free = _generation(workload.engine, replace(calls, wait=np.zeros_like(calls.wait)), 0.0)
    generation = _with_tools(workload, calls)
    with_tools = generation + training + publishing * generation / (generation + training)
    return Ceiling(limit / (free + training), limit / with_tools)


def generation_seconds(workload: Workload, jobs: Iterable[Sequence[Job]], piece: int | None = None) -> float:
    """What all units together need for these jobs, with tools that take their time: see `Ceiling.with_tools`."""
    return _with_tools(workload, _calls(workload, jobs, piece))


def _with_tools(workload: Workload, calls: _Calls) -> float:
    return min(_generation(workload.engine, calls, longest) for longest in np.geomspace(1.0, workload.tools.most, 50))


def _calls(workload: Workload, jobs: Iterable[Sequence[Job]], piece: int | None) -> _Calls:
    piece = workload.engine.kv_tokens if piece is None else piece
    steps, shared, spared = workload.engine.prefill_steps, workload.shared_tokens, workload.spared_tokens
    alone, beside = (steps(workload.context.start - tokens) for tokens in (0, shared))
    prompt = beside + (alone - beside) / workload.batch.samples  # on average over a group
    rows = []
    for job in chain.from_iterable(jobs):
        length, prefill = 0, prompt
        for turn, following in zip(job.turns, [*job.turns[1:], None], strict=True):
            output = turn.output_tokens
            pieces, rest = divmod(output, piece)
            length += turn.new_tokens
            reserve = length + min(piece, output) - spared
            written = output * (length - spared) + piece**2 * pieces * (pieces + 1) / 2 + rest * output
            length += output
            wait, next_new, next_output = (
                (turn.tool_seconds, following.new_tokens, following.output_tokens) if following else (0.0, 0, 0)
            )
            next_prefill, lost = steps(next_new), steps(length - shared + next_new)
            next_reserve = length + next_new + min(piece, next_output) - spared
            rows.append((prefill, output, lost, length - spared, reserve, written, wait, next_prefill, next_reserve))
            prefill = next_prefill
    return _Calls(*np.array(rows, dtype=float).T)


def _generation(engine: Engine, calls: _Calls, longest_wait: float) -> float:
    """Seconds of all units with KV full all the time, where contexts that wait longer than this are prefilled again."""
    kept = calls.wait <= longest_wait
    again = np.where(kept, 0.0, calls.lost - calls.next_prefill)
    kv = engine.kv_tokens * engine.units
    # Steps, were KV full of calls.
    served = float((calls.prefill * calls.reserve + calls.written + again * calls.next_reserve).sum()) / kv
    waited = float((calls.wait * calls.length)[kept].sum()) / kv  # seconds, were it full of contexts that wait
    prefill_seconds = engine.prefill_chunk / engine.prefill_rate
    work = float((prefill_seconds * (calls.prefill + again) + engine.decode_seconds * calls.output).sum()) / engine.units
    # generation = step_seconds * steps + work, and steps = served + waited * steps / generation
    half = (engine.step_seconds * served + waited + work) / 2
    return half + math.sqrt(half**2 - waited * work)
