"""The CPU as a verl platform: the calls that a GPU would answer, answered for the host's processor and memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform
from verl.utils import distributed


def install() -> None:
    set_platform(CpuPlatform())
    # verl names a backend for the CPU and one for the device; torch refuses to hear of one device twice.
    distributed.initialize_global_process_group_ray = partial(distributed.initialize_global_process_group_ray, backend="cpu:gloo")


class CpuModule(ModuleType):
    """`torch.cpu` with what verl further asks of a device: memory is the process's own, and there is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def memory_allocated(self, *_: object) -> int:
        return int(psutil.Process().memory_info().rss)

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def empty_cache(self) -> None: ...

    def ipc_collect(self) -> None: ...

    def reset_peak_memory_stats(self, *_: object) -> None: ...

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, *_: object) -> str:
        return "cpu"


class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl has no types
    """A worker's "GPU" is one place in Ray's count of resources; verl's code never learns that there is none behind it."""

    def __init__(self) -> None:
        self._module = CpuModule("palestra_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors `.to(current_device())`, and a number would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        with nullcontext():
            yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
