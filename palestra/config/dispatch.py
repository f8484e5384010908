"""How many rollouts are where at once: one section for each dispatcher."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from palestra.config.section import Section


class _Dispatch(Section):
    """What all dispatchers keep to."""

    init_seconds: PositiveFloat = 600.0
    """Time for `setup`, and for `harvest`."""
    reward_seconds: PositiveFloat = 600.0
    """Time for `score`."""
    retries: NonNegativeInt = 2
    """How often a rollout that the infrastructure broke is tried again."""
    backoff: NonNegativeFloat = 1.0
    """Seconds before the first retry; twice as many before each further one."""


class BatchDispatch(_Dispatch):
    """Everything at once."""

    kind: Literal["batch"]


class BoundedDispatch(_Dispatch):
    """Slots that are held through all stages."""

    kind: Literal["bounded"]
    slots: PositiveInt = 64
    """Rollouts in flight."""


class PipelineDispatch(_Dispatch):
    """Workers for each stage, and a bounded queue between."""

    kind: Literal["pipeline"]
    init: PositiveInt = 32
    run: PositiveInt = 64
    reward: PositiveInt = 32
    queue: PositiveInt = 32
    """Rollouts that may wait before a stage."""


class StreamDispatch(_Dispatch):
    """Limits for each stage, runtimes prewarmed, runs admitted by the sampler's KV budget."""

    kind: Literal["stream"]
    init: PositiveInt = 32
    """Rollouts in their init at once."""
    run: PositiveInt = 128
    """Rollouts in their run at once."""
    reward: PositiveInt = 32
    """Rollouts in their reward at once."""
    runtimes: PositiveInt | None = None
    """Runtimes open at once, prewarmed ones included; init + run when not given."""
    kv_share: Annotated[FiniteFloat, Field(gt=0, le=1000)] = 4.0
    """Runs are admitted while all their contexts, at full length, are at most so many times the sampler's KV tokens: few are that
    long at the same time, and where KV is short nevertheless, the sampler lets some wait."""


AnyDispatch = BatchDispatch | BoundedDispatch | PipelineDispatch | StreamDispatch

Dispatch = Annotated[
    AnyDispatch,
    Field(discriminator="kind"),
    pydantic.BeforeValidator(lambda value: {"kind": "stream"} | value if isinstance(value, dict) else value),
]
