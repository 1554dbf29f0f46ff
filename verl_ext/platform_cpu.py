"""A platform on which verl trains without any accelerator. Selected by ``VERL_PLATFORM=cpu``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(self: object, *args: object, **options: object) -> None:
    """A CPU has no cache to empty, no allocator or profiler to set up, one device, and its work is never pending."""


class CpuDevice(ModuleType):
    """``torch.cpu`` with those functions of ``torch.cuda`` that verl calls on a device module."""

    def __init__(self) -> None:
        super().__init__("verl_ext.cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = set_device = synchronize = _nothing
    reset_peak_memory_stats = reset_accumulated_memory_stats = _nothing

    def is_available(self) -> bool:
        """No: nothing may take this for an accelerator."""
        return False

    def memory_allocated(self, device: object = None) -> int:
        """Bytes on the device: none."""
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Free and total bytes of main memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def get_device_name(self, device: object = None) -> str:
        """Shown in logs."""
        return "CPU"

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """The CPU generator's state."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Set the CPU generator's state."""
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    """verl's platform interface over the CPU; never chosen by itself, only by ``VERL_PLATFORM=cpu``."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = CpuDevice()
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        """The CPU is always there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """No, so that machines with an accelerator keep using it."""
        return False

    def current_device(self) -> torch.device:
        """The one device; FSDP takes a device where the interface says index."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Devices of one process."""
        return 1

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """CPUs have no capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives run over gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """What Ray sets for its logical slots."""
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        """No profiler to mark."""
        return nullcontext()

    def ray_resource_name(self) -> str:
        """Logical GPU slots (``ray.init(num_gpus=N)``): verl's resource check knows GPU and NPU only."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray has nothing to leave alone."""
        return []

    def is_ipc_supported(self) -> bool:
        """Weights travel through Ray."""
        return False
