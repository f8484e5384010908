"""Where the units' time went: what a schedule does with it beyond what the physical limit counts."""

from dataclasses import astuple, dataclass

from palestra.lab.cluster import Cluster


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Shares of the units' time; together they are 1."""

    generation: float
    """As the limit counts it: every token once, with KV full of contexts that decode."""
    training: float
    publishing: float
    chunks: float
    """What was missing from chunks that were prefilled, where a part of one takes as long as the whole."""
    again: float
    """Prefilling tokens whose KV had been there before."""
    reserved: float
    """KV that served contexts held beyond their tokens: for what they were about to write, and while they prefilled."""
    waiting: float
    """KV of contexts that waited for a tool, or for room."""
    empty: float
    """KV that no context held, after the start."""
    idle: float
    """Units that had nothing to do, after the start."""
    start: float
    """The same two until the first group was trained."""


def account(cluster: Cluster, generation_seconds: float) -> UnitTime:
    """Of a cluster's life, for jobs whose generation could not take less than this on all units."""
    spec, totals, use = cluster.spec, cluster.engine.totals(), cluster.use()
    generation = generation_seconds * spec.units
    again = totals.prefilled_again / spec.prefill_rate
    prefilled = totals.prefilled / spec.prefill_rate
    decoding = generation - totals.decoded * spec.decode_seconds - (prefilled - again)  # what the limit counts of full KV
    start = cluster.lost_at_start
    parts = UnitTime(
        generation=generation,
        training=use.training,
        publishing=use.publishing,
        chunks=totals.chunks * spec.prefill_chunk / spec.prefill_rate - prefilled,
        again=again,
        reserved=(totals.held - totals.idle) * spec.step_seconds - decoding,
        waiting=totals.idle * spec.step_seconds,
        empty=cluster.engine.empty_seconds() - start.empty,
        idle=use.idle - start.idle,
        start=start.empty + start.idle,
    )
    whole = use.generating + use.training + use.publishing + use.idle
    return UnitTime(*(part / whole for part in astuple(parts)))
