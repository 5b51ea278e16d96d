"""Copies and fills of the double's driver."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as real
import numpy as np
from fake_calls import driver_call
from fake_memory import Bytes
from fake_streams import Reach, Work

_HOST, _DEVICE = (
    int(real.CUmemorytype.CU_MEMORYTYPE_HOST),
    int(real.CUmemorytype.CU_MEMORYTYPE_DEVICE),
)
_KIND = {_HOST: "host", _DEVICE: "device"}
Rows = list[tuple[int, int]]  # (address, bytes) each


class Copies:
    """The functions that copy and fill memory."""

    streams: Any
    memory: Any

    def host_address(self, given: Any) -> int:
        """Return a host pointer as the real binding takes it: a number, or an object with a buffer."""
        if isinstance(given, int):
            return given
        return int(np.frombuffer(given, np.uint8).ctypes.data)

    @driver_call()
    def cuMemcpyHtoDAsync(self: Any, dstDevice, srcHost, ByteCount, hStream):
        src = [(self.host_address(srcHost), int(ByteCount))]
        return self._copy(
            "copy to device", "device", [(int(dstDevice), int(ByteCount))], "host", src, hStream
        )

    @driver_call()
    def cuMemcpyDtoHAsync(self: Any, dstHost, srcDevice, ByteCount, hStream):
        dst = [(self.host_address(dstHost), int(ByteCount))]
        return self._copy("copy to host", "host", dst, "device", [(int(srcDevice), int(ByteCount))], hStream)

    @driver_call()
    def cuMemcpyDtoDAsync(self: Any, dstDevice, srcDevice, ByteCount, hStream):
        size = int(ByteCount)
        rows = [(int(dstDevice), size)], [(int(srcDevice), size)]
        return self._copy("copy on device", "device", rows[0], "device", rows[1], hStream)

    @driver_call(unsafe=True)
    def cuMemcpyHtoD(self: Any, dstDevice, srcHost, ByteCount):
        data = _host_bytes(self.host_address(srcHost), int(ByteCount)).copy()

        def run(reach: Reach) -> None:
            reach.write(int(dstDevice), data.size)[:] = data

        self._run_now(Work("copy to device", run), int(dstDevice), data.size)

    @driver_call(unsafe=True)
    def cuMemcpyDtoH(self: Any, dstHost, srcDevice, ByteCount):
        out = _host_bytes(self.host_address(dstHost), int(ByteCount))

        def run(reach: Reach) -> None:
            out[:] = reach.read(int(srcDevice), out.size)

        self._run_now(Work("copy to host", run), int(srcDevice), out.size)

    @driver_call()
    def cuMemsetD8Async(self: Any, dstDevice, uc, N, hStream):
        return self._fill(int(dstDevice), np.array(int(uc), np.uint8), int(N), hStream)

    @driver_call()
    def cuMemsetD16Async(self: Any, dstDevice, us, N, hStream):
        return self._fill(int(dstDevice), np.array(int(us), np.uint16), int(N), hStream)

    @driver_call()
    def cuMemsetD32Async(self: Any, dstDevice, ui, N, hStream):
        return self._fill(int(dstDevice), np.array(int(ui), np.uint32), int(N), hStream)

    @driver_call()
    def cuMemcpy3DAsync(self: Any, pCopy, hStream):
        sides = []
        for side in ("dst", "src"):
            memory_type = int(getattr(pCopy, f"{side}MemoryType"))
            if memory_type not in _KIND:
                return "CUDA_ERROR_INVALID_VALUE"
            rows = _rows(pCopy, side, memory_type)
            if rows is None:
                return "CUDA_ERROR_INVALID_VALUE"
            sides += [_KIND[memory_type], rows]
        return self._copy("copy of blocks", *sides, hStream)

    def _copy(self: Any, label: str, to: str, dst: Rows, of: str, src: Rows, hStream: Any) -> str | None:
        stream = self.stream(hStream)
        if stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        work = Work(label, lambda reach: _copy_rows(reach, dst, src))
        for (address, size), kind in ((row, kind) for rows, kind in ((dst, to), (src, of)) for row in rows):
            self.memory.find(address, size, work.label, kind)
        work.on_enqueue = self._watch_host(work, src if of == "host" else [], dst if to == "host" else [])
        self.streams.enqueue(stream, work)
        return None

    def _watch_host(self: Any, work: Work, src: Rows, dst: Rows) -> Callable[[], Callable[[], None] | None]:
        """Let a copy notice that the host changed its source before it ran; hide what its destination held."""

        def on_enqueue() -> Callable[[], None] | None:
            if not self.streams.eager and not any(one.reads_host for one in self.streams.pending):
                for address, size in dst:
                    self.memory.view(address, size, work.label, "host")[:] = 0xFF
            if not src:
                return None
            # A copy that is queued before may write the source: then only the end of that one is known.
            if any(one.writes_host for one in self.streams.pending):
                return None
            before = self._checksum(work, src)

            def check() -> None:
                if self._checksum(work, src) != before:
                    raise self.memory.violate(
                        f"{work.label}: the host changed the source before the copy ran; "
                        "wait for an event behind the copy"
                    )

            return check

        work.reads_host, work.writes_host = bool(src), bool(dst)
        return on_enqueue

    def _checksum(self: Any, work: Work, rows: Rows) -> int:
        value = 0
        for address, size in rows:
            value = zlib.crc32(self.memory.view(address, size, work.label, "host"), value)
        return value

    def _fill(self: Any, address: int, value: Any, count: int, hStream: Any) -> str | None:
        stream = self.stream(hStream)
        if stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if address % value.itemsize:
            return "CUDA_ERROR_INVALID_VALUE"
        work = Work("fill", lambda reach: _fill(reach.write(address, count * value.itemsize), value))
        self.memory.find(address, count * value.itemsize, work.label, "device")
        self.streams.enqueue(stream, work)
        return None

    def _run_now(self: Any, work: Work, address: int, size: int) -> None:
        self.memory.find(address, size, work.label, "device")
        self.streams.enqueue(self.streams.default, work)
        self.streams.synchronize(self.streams.default)


def _fill(out: Bytes, value: Any) -> None:
    out.view(value.dtype)[:] = value


def _copy_rows(reach: Reach, dst: Rows, src: Rows) -> None:
    # All rows are read before one is written: what a copy onto itself does on a device nobody knows.
    data = [reach.read(address, size).copy() for address, size in src]
    for (address, size), row in zip(dst, data, strict=True):
        reach.write(address, size)[:] = row


def _rows(copy: Any, side: str, memory_type: int) -> Rows | None:
    """Return the rows of one side of a 3D copy, None where the driver refuses the numbers."""

    def of(name: str) -> int:
        return int(getattr(copy, side + name))

    base = of("Host") if memory_type == _HOST else of("Device")
    width, height, depth = int(copy.WidthInBytes), int(copy.Height), int(copy.Depth)
    pitch, lines = of("Pitch"), of("Height")
    if not (width and height and depth):
        return None
    if (height > 1 or depth > 1) and not of("XInBytes") + width <= pitch < 1 << 31:
        return None
    if depth > 1 and of("Y") + height > lines:
        return None
    return list(_each_row(base + of("XInBytes"), width, height, depth, pitch, lines, of("Y"), of("Z")))


def _each_row(
    base: int, width: int, height: int, depth: int, pitch: int, lines: int, y: int, z: int
) -> Iterator[tuple[int, int]]:
    for plane in range(depth):
        for line in range(height):
            yield base + ((z + plane) * lines + y + line) * pitch, width


def _host_bytes(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
