"""What torch asks of ``torch.npu``, and how a process gets the device and the groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.torch_backend.simulated_npu import private_format, record
from tests.torch_backend.simulated_npu.behaviour import Behaviour, behave
from tests.torch_backend.simulated_npu.tensor import NpuTensor, index_of, on_device

_library: torch.library.Library | None = None


class Stream:
    """Kernels end before the host goes on, so that all streams are alike."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        record.wait("synchronize")


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        record.wait("synchronize")


class Device:
    """``torch.npu``; the current device is that of ``LOCAL_RANK``, as launchers set it."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self._current = int(os.environ.get("LOCAL_RANK", "0"))
        self._stream = Stream()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 8

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = device if isinstance(device, int) else torch.device(device).index or 0

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def synchronize(self, device: Any = None) -> None:
        record.wait("synchronize")


@contextmanager
def present() -> Iterator[None]:
    """The device in a process that goes on without: its name stays, ``torch_npu`` goes."""
    set_up()
    try:
        yield
    finally:
        private_format.remove()


def set_up() -> None:
    """Make the device, ``torch_npu`` and the backend ``hccl`` known in this process."""
    global _library
    private_format.install()
    if _library is not None:
        return
    _setup_privateuseone_for_python_backend("npu", backend_module=Device())
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    dist.Backend.register_backend("hccl", ProcessGroupGloo, devices=["npu"])


def join(store: str, backend: str, behaviour: Behaviour | None = None) -> None:
    """Leave the group of the pool, and meet again in one of ``backend`` through a file."""
    set_up()
    behave(behaviour or Behaviour())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> NpuTensor:
    return on_device(torch.empty(size, dtype=dtype), index_of(device), "empty")


def _copy_from(source: torch.Tensor, target: NpuTensor, non_blocking: bool = False) -> NpuTensor:
    """How ``torch.tensor`` fills a new tensor of the device."""
    record.wait("_copy_from the host")
    target.raw.copy_(source)
    return target


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> NpuTensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype), index_of(device), "empty_strided")
