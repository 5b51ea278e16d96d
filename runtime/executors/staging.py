"""Arrays on their way to the device: laid out in one pinned buffer, copied there at once.

The device has one buffer, since its runs come one after another; the host has several, so that it can prepare the next
run while the device works. Equal sizes give equal offsets, so a CUDA graph finds its inputs where it was captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..batch import Int32Array
from ..errors import CudaError, InternalError
from .cuda import Context, PinnedMemory

ALIGNMENT = 256  # bytes; what TensorRT asks of every address
NUM_BUFFERS = 3


def aligned(num_bytes: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def offsets_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where arrays of these bytes begin, one behind the other, and where the last one ends."""
    offsets, end = [], 0
    for size in sizes:
        start = aligned(end)
        offsets.append(start)
        end = start + size
    return offsets, end


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...]) -> tuple[list[int], list[slice], int]:
    """Return offsets and end in bytes, as offsets_of, and the words, of arrays of so many 32-bit words each."""
    offsets, end = offsets_of(4 * size for size in sizes)
    return offsets, [slice(at // 4, at // 4 + size) for at, size in zip(offsets, sizes, strict=True)], end


class Staging:
    """Sends arrays of 32-bit words to the device, one copy for all of a run.

    capacity : bytes of the device's buffer and of each of the host's; allocated here, with the context current
    raises OutOfMemoryError
    """

    def __init__(self, context: Context, capacity: int, num_buffers: int = NUM_BUFFERS) -> None:
        self.capacity = aligned(max(1, capacity))
        self._context = context
        self._device: int | None = None
        self._hosts: list[PinnedMemory] = []
        self._words: list[Int32Array] = []  # each host buffer's
        self._events: list[Any] = []
        self._unmarked: set[int] = set()  # host buffers with a copy that no event follows
        self._next = 0
        try:
            self._device = context.alloc(self.capacity)
            for _ in range(num_buffers):
                self._hosts.append(context.alloc_pinned(self.capacity))
                self._words.append(self._hosts[-1].bytes.view(np.int32))
                self._events.append(context.event())
        except BaseException:
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory that it holds."""
        return len(self._hosts) * self.capacity

    def send(self, arrays: Mapping[str, Int32Array], stream: Any) -> dict[str, int]:
        """Copy arrays to the device in the stream and return their addresses there, valid until the next call's copy.

        Waits where the host is a whole round of buffers ahead of the device. The arrays may change afterwards.
        stream : the same in every call
        """
        offsets, places, end = _layout(tuple([array.size for array in arrays.values()]))
        if end > self.capacity:
            raise InternalError(f"a run's inputs take {end} bytes, staging has {self.capacity}")
        index = self._next
        self._next = (index + 1) % len(self._hosts)
        host, event = self._hosts[index], self._events[index]
        if index in self._unmarked:
            self._context.wait(stream)
            self._unmarked.remove(index)
        self._context.wait_event(event)
        words = self._words[index]
        for place, array in zip(places, arrays.values(), strict=True):
            words[place] = array.reshape(-1)
        device = self._device
        assert device is not None
        if end:
            # Whatever fails from here on: without its event the copy may still be to come.
            self._unmarked.add(index)
            self._context.copy_to_device(device, host.address, end, stream)
            self._context.record(event, stream)
            self._unmarked.remove(index)
        return {name: device + offset for name, offset in zip(arrays, offsets, strict=True)}

    def close(self) -> None:
        """Release everything, when the stream's work is done. Never fails; twice is fine."""
        for event in self._events:
            with contextlib.suppress(CudaError):
                self._context.destroy_event(event)
        for host in self._hosts:
            with contextlib.suppress(CudaError):
                self._context.free_pinned(host)
        if self._device is not None:
            with contextlib.suppress(CudaError):
                self._context.free(self._device)
        self._events, self._hosts, self._words, self._device = [], [], [], None
