"""`torch.simdev`, the counterpart of torch.cuda: functions that torch's generic code expects of a device's module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Event, Stream, Tensor

from zeromesh.simdev.build import native

MEMORY_BYTES = 1 << 50
"""More than anything requests: readers of the peaks judge whether these would fit a real device."""

DeviceLike = torch.device | int | str | None


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: DeviceLike) -> None:
    pass


def device(device: DeviceLike) -> AbstractContextManager[None]:
    return nullcontext()


def get_device_name(device: DeviceLike = None) -> str:
    return "simulated device"


def get_device_properties(device: DeviceLike = None) -> Any:
    return SimpleNamespace(name=get_device_name(), total_memory=MEMORY_BYTES)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize()


def current_stream(device: DeviceLike = None) -> Stream:
    return torch.accelerator.current_stream()


def default_stream(device: DeviceLike = None) -> Stream:
    return Stream(stream_id=0, device_index=0, device_type=current_stream().device_type)


def set_stream(stream: Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def _generator() -> torch.Generator:
    generator: torch.Generator = native().default_generator()
    return generator


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    _generator().seed()


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: DeviceLike = None) -> Tensor:
    return _generator().get_state()


def set_rng_state(state: Tensor, device: DeviceLike = None) -> None:
    _generator().set_state(state)


def memory_allocated(device: DeviceLike = None) -> int:
    return int(native().memory_stats().rounded_bytes)


def max_memory_allocated(device: DeviceLike = None) -> int:
    return int(native().memory_stats().peak_rounded_bytes)


def memory_reserved(device: DeviceLike = None) -> int:
    return int(native().memory_stats().reserved_bytes)


def max_memory_reserved(device: DeviceLike = None) -> int:
    return int(native().memory_stats().peak_reserved_bytes)


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    found: dict[str, Any] = torch.accelerator.memory_stats()
    return found


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    return MEMORY_BYTES - memory_reserved(), MEMORY_BYTES


def host_memory(num_bytes: int) -> Tensor:
    """Returns zeroed host memory of `num_bytes` bytes for copies to and from the device, 1-D. On a virtual device it is
    virtual, in a tensor of that device."""
    if not native().is_virtual():
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    inside = native().InHostMemory(True)
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="simdev")
    del inside
    return memory


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    native().reset_peaks()


def empty_cache() -> None:
    native().empty_cache()


__all__ = ["Event", "Stream"]
