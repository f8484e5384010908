"""A rollout server for verl on the CPU: the embedded sampler in a Ray actor, which takes new weights from verl's training worker.

`Server` is what verl's client calls, `Replica` starts it, and `Adapter` is the training worker's line to it.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from palestra.backends.torch import model
from palestra.backends.torch.sampler import TorchSampler
from palestra.errors import InfrastructureError, first_line
from palestra.protocols import Sampling

NAME = "embedded"
KV_TOKENS = 131_072
WRAPPER, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""How PEFT names an adapter's weights."""


def install() -> None:
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.Adapter"
    RolloutReplicaRegistry.register(NAME, lambda: Replica)


class Server:
    """Samples tokens. Requests run side by side in the sampler's batch, and each says which weights wrote its tokens."""

    def __init__(self, folder: str, dtype: str, adapted: bool) -> None:
        model.keep_freed_memory()
        loaded = model.load(Path(folder), getattr(torch, dtype), torch.device("cpu"))
        # An adapter is merged into the weights that it found, which the sampler does not keep.
        self._base = {name: weight.detach().clone() for name, weight in loaded.named_parameters()} if adapted else {}
        self._sampler = TorchSampler(loaded, KV_TOKENS)
        self._sampler.start()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **media: object
    ) -> TokenOutput:
        sampling = Sampling(
            sampling_params["temperature"], sampling_params["max_tokens"], frozenset(sampling_params["stop_token_ids"])
        )
        expected = len(prompt_ids) + sampling.max_tokens
        async with self._sampler.session(sampling_params["seed"], expected) as session:
            completion = await session.sample(prompt_ids, sampling)
        version = completion.versions[0] if completion.versions else self._sampler.version
        return TokenOutput(
            token_ids=list(completion.tokens),
            log_probs=list(completion.logprobs),
            stop_reason="completed",
            extra_fields={"global_steps": version},
        )

    async def update_weights(self, weights: dict[str, Tensor], version: int, scale: float | None) -> None:
        """Whole weights or, with a scale, those of an adapter."""
        new = weights if scale is None else merged(self._base, weights, scale)
        await asyncio.to_thread(self._sampler.replace_weights, new, version)

    # The weights stay where they are between steps, so there is nothing to free or to fetch back.
    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


class Replica(RolloutReplica):  # type: ignore[misc]  # verl has no types
    """One server, in an actor beside the training worker."""

    async def launch_servers(self) -> None:
        name = _server_name(self.replica_rank)
        self._server_handle = (
            ray.remote(Server)
            .options(name=name, max_concurrency=self.max_concurrency)
            .remote(self.model_config.path, self.config.dtype, self.model_config.lora_rank > 0)
        )
        await self._server_handle.wake_up.remote()  # which also waits until the model is loaded
        self._server_address = name
        self.servers = [self._server_handle]


class Adapter(base.BaseRollout):  # type: ignore[misc]  # verl has no types
    """In the training worker: sends its weights to the server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int = 0,
        peft_config: dict[str, Any] | None = None,
        **_: object,
    ) -> None:
        taken = {name: tensor.detach().clone() for name, tensor in weights}
        scale = peft_config["lora_alpha"] / peft_config["r"] if peft_config else None
        try:
            server = ray.get_actor(_server_name(0))
        except ValueError as error:
            raise InfrastructureError(f"verl's rollout server does not answer: {first_line(error)}") from None
        try:
            await server.update_weights.remote(taken, global_steps or 0, scale)
        except ray.exceptions.RayActorError as error:  # what the server itself raises goes on as it is
            raise InfrastructureError(f"verl's rollout server does not answer: {first_line(error)}") from None


def merged(base: dict[str, Tensor], adapter: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The adapted layers' weights, W + scale · B · A, by the names that the model has for them."""
    new = {}
    for name, down in adapter.items():
        if name.endswith(DOWN):
            layer = f"{name.removeprefix(WRAPPER).removesuffix(DOWN)}.weight"
            new[layer] = base[layer] + scale * (adapter[name.removesuffix(DOWN) + UP] @ down).to(base[layer].dtype)
    return new


def _server_name(rank: int) -> str:
    return f"palestra_server_{rank}"
