"""Where there is no GPU: our embedded sampler behind SkyRL's `InferenceEngineInterface`, in the place of its vLLM servers."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, NoReturn

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from torch import Tensor

from palestra.backends.torch.sampler import TorchSampler, TorchSession
from palestra.protocols import Sampling


class CpuEngine(InferenceEngineInterface):
    def __init__(self, sampler: TorchSampler, model_name: str) -> None:
        self._sampler, self._model_name = sampler, model_name
        self._sessions: dict[str, tuple[AsyncExitStack, TorchSession]] = {}
        self._weight_version = 0

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def weight_version(self) -> int:
        return self._weight_version

    def increment_weight_version(self) -> None:
        self._weight_version += 1

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Between two decode steps; replies under way go on with the new weights, as they do on SkyRL's engines."""
        self._sampler.replace_weights(weights, self._weight_version)

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        how = input_batch["sampling_params"]
        sampling = Sampling(how["temperature"], how["max_tokens"], frozenset(how["stop_token_ids"]))
        asked = zip(input_batch["prompt_token_ids"], input_batch["session_ids"], strict=True)
        sessions = [(tokens, await self._session(name, how["seed"])) for tokens, name in asked]
        done = await asyncio.gather(*(session.sample(tokens, sampling) for tokens, session in sessions))
        return {
            "response_ids": [list(completion.tokens) for completion in done],
            "response_logprobs": [list(completion.logprobs) for completion in done],
            "stop_reasons": [completion.finish for completion in done],
        }

    async def _session(self, name: str, seed: int) -> TorchSession:
        """The session of that name; the seed of its first request decides all its draws."""
        if name not in self._sessions:
            stack = AsyncExitStack()
            self._sessions[name] = (stack, await stack.enter_async_context(self._sampler.session(seed, 0)))
        return self._sessions[name][1]

    async def finish_session(self, session_id: str) -> None:
        if session_id in self._sessions:
            stack, _ = self._sessions.pop(session_id)
            await stack.aclose()

    async def teardown(self) -> None:
        self._sampler.close()

    # Nothing is asleep here, nothing is elsewhere, and new weights need no pause.

    async def wake_up(self, *args: Any, **kwargs: Any) -> None: ...

    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...

    async def pause_generation(self) -> None: ...

    async def resume_generation(self) -> None: ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None: ...

    async def get_world_size(self) -> tuple[int, int]:
        return 1, 1

    async def init_weight_update_communicator(self, init_info: Any) -> NoReturn:
        raise NotImplementedError("the engine without a GPU takes weights from its own process only")

    async def update_named_weights(self, request: Any) -> NoReturn:
        raise NotImplementedError("the engine without a GPU takes weights from its own process only")

    def get_endpoint_url(self) -> NoReturn:
        raise NotImplementedError("the engine without a GPU has no HTTP endpoint")

    async def chat_completion(self, request_payload: Any) -> NoReturn:
        self.get_endpoint_url()

    async def render_chat_completion(self, request_payload: Any) -> NoReturn:
        self.get_endpoint_url()

    async def completion(self, request_payload: Any) -> NoReturn:
        self.get_endpoint_url()
