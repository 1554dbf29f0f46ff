"""A verl platform without an accelerator. ``VERL_PLATFORM=cpu`` selects it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(self: object, *args: object, **options: object) -> None:
    """Do nothing: a CPU has no cache, allocator or profiler to control, one device, and no pending work."""


class CpuDevice(ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls on a device module."""

    def __init__(self) -> None:
        super().__init__("verl_ext.cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = set_device = synchronize = _nothing
    reset_peak_memory_stats = reset_accumulated_memory_stats = _nothing

    def is_available(self) -> bool:
        """Return false: a CPU is not an accelerator."""
        return False

    def memory_allocated(self, device: object = None) -> int:
        """Return 0 bytes: the device has no memory of its own."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return the free and total bytes of main memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def get_device_name(self, device: object = None) -> str:
        """Return the name for logs."""
        return "CPU"

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the state of the CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Set the state of the CPU generator."""
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    """verl's platform interface for the CPU. verl never selects it without ``VERL_PLATFORM=cpu``."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = CpuDevice()
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        """Return true: every machine has a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return false, so that machines with an accelerator keep using it."""
        return False

    def current_device(self) -> torch.device:
        """Return the only device. FSDP accepts a device where the interface expects an index."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return the number of devices per process."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no version: CPUs have no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return gloo, the backend of collectives on a CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for its logical slots."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        """Return an empty context: no profiler reads the range."""
        return nullcontext()

    def ray_resource_name(self) -> str:
        """Return GPU, for logical slots (``ray.init(num_gpus=N)``): verl's resource check knows GPU and NPU only."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables: Ray has no device setting to leave unchanged."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return false: weights travel through Ray."""
        return False
