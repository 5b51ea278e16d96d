"""Device and host memory of the test double: guarded host arrays, exact accounting, every access checked.

An address of the double is the address of the host memory behind it, so that Triton's interpreter can run kernels on
it. Nothing is handed back to the system before the double goes: use after free finds poison and is an error, never a
crash. Fresh memory holds 0xFF (NaN in every float type, -1 as an integer), freed memory 0xDB.
"""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

GUARD = 1024
_FRESH, _FREED, _GUARDED = 0xFF, 0xDB, 0xA5
_DEVICE_ALIGN, _HOST_ALIGN = 512, 4096
_CHUNK = (
    2 << 20
)  # the driver takes memory from the device in chunks, and gives small allocations parts of one


class DoubleError(AssertionError):
    """What the program did is undefined on a real device; the double would rather stop."""


@dataclasses.dataclass
class Access:
    """A range [low, high) of an allocation that work number `seq` of a stream read or wrote."""

    low: int
    high: int
    writes: bool
    stream: int
    seq: int
    label: str


class Allocation:
    """One block of memory. kind : "device" or "host" (pinned), or "engine": what TensorRT allocates for itself."""

    def __init__(self, size: int, kind: str, label: str) -> None:
        align = _HOST_ALIGN if kind == "host" else _DEVICE_ALIGN
        self.size, self.kind, self.label = size, kind, label
        self.where, self.freed_at = caller(), ""
        self.accesses: list[Access] = []
        self._backing = np.empty(size + 2 * GUARD + align, np.uint8)
        self.address = -(-(self._backing.ctypes.data + GUARD) // align) * align
        start = self.address - self._backing.ctypes.data
        self.bytes: Bytes = self._backing[start : start + size]
        self._guards = (self._backing[start - GUARD : start], self._backing[start + size :][:GUARD])
        if kind != "engine":  # nobody sees what TensorRT has in its own
            self.bytes[:] = _FRESH
        for guard in self._guards:
            guard[:] = _GUARDED

    @property
    def end(self) -> int:
        """One past the last address."""
        return self.address + self.size

    def __str__(self) -> str:
        freed = f", freed at {self.freed_at}" if self.freed_at else ""
        return f"{self.label or self.kind + ' memory'} of {self.size} bytes allocated at {self.where}{freed}"

    def free(self) -> None:
        """Poison it; it is kept, so that later accesses are found."""
        if self.kind != "engine":
            self.bytes[:] = _FREED
        self.freed_at = caller()

    def broken_guard(self) -> int | None:
        """Return the offset, from the allocation's start, of a byte that was written outside it."""
        for guard, base in zip(self._guards, (-GUARD, self.size), strict=True):
            changed = np.flatnonzero(guard != _GUARDED)
            if changed.size:
                return base + int(changed[0])
        return None


class Memory:
    """All allocations of a device and its pinned host memory.

    total_bytes : the device's memory; reserved_bytes : what the driver and the context take of it
    """

    def __init__(self, total_bytes: int, reserved_bytes: int = 0) -> None:
        self.total_bytes, self.reserved_bytes = total_bytes, reserved_bytes
        self.violations: list[str] = []
        self._all: list[Allocation] = []  # by address
        self._addresses: list[int] = []
        self._device_bytes = 0

    def violate(self, text: str) -> DoubleError:
        """Note what the program did wrong, and return it to be raised: a program may swallow exceptions."""
        self.violations.append(text)
        return DoubleError(text)

    @property
    def free_bytes(self) -> int:
        """What cuMemGetInfo tells."""
        used = -(-self._device_bytes // _CHUNK) * _CHUNK
        return max(0, self.total_bytes - self.reserved_bytes - used)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory allocated now, each allocation rounded up to its alignment."""
        return self._device_bytes

    def allocate(self, size: int, kind: str, label: str = "") -> Allocation | None:
        """Return a new allocation, None where the device is full."""
        if kind != "host":
            after = self._device_bytes + _rounded(size)
            if self.reserved_bytes + -(-after // _CHUNK) * _CHUNK > self.total_bytes:
                return None
            self._device_bytes = after
        made = Allocation(size, kind, label)
        at = bisect.bisect(self._addresses, made.address)
        self._addresses.insert(at, made.address)
        self._all.insert(at, made)
        return made

    def free(self, address: int, *kinds: str) -> bool:
        """Free what begins at an address; False where nothing of these kinds ever did."""
        found = self._nearest(address)
        if found is None or found.address != address or found.kind not in kinds:
            return False
        if found.freed_at:
            raise self.violate(f"double free of {found}")
        self._check_guards(found)
        found.free()
        if found.kind != "host":
            self._device_bytes -= _rounded(found.size)
        return True

    def find(self, address: int, size: int, what: str, *kinds: str) -> Allocation:
        """Return the live allocation of one of `kinds` that holds [address, address + size)."""
        found = self._nearest(address)
        if found is None or address >= found.end + GUARD:
            raise self.violate(f"{what}: {address:#x} is no address of {' or '.join(kinds)} memory")
        if found.freed_at:
            raise self.violate(f"{what}: use after free of {found}")
        if found.kind not in kinds:
            raise self.violate(f"{what}: {found} is not {' or '.join(kinds)} memory")
        offset = address - found.address
        if offset + size > found.size:
            raise self.violate(
                f"{what}: bytes {offset}..{offset + size} are outside {found}, which ends at {found.size}"
            )
        return found

    def view(self, address: int, size: int, what: str, *kinds: str) -> Bytes:
        """Return the bytes of a range, checked as `find` does."""
        found = self.find(address, size, what, *kinds)
        return found.bytes[address - found.address :][:size]

    def access(
        self, address: int, size: int, writes: bool, by: tuple[int, int], clock: Mapping[int, int], what: str
    ) -> Bytes:
        """Return the bytes of a range for work `by` = (stream, seq), after looking for races with earlier work.

        clock : stream -> number of its last work that is known to end before this one begins
        """
        found = self.find(address, size, what, "device", "host", "engine")
        low = address - found.address
        high = low + size
        for other in found.accesses:
            if (
                other.stream == by[0]
                or not (writes or other.writes)
                or other.high <= low
                or high <= other.low
            ):
                continue
            if clock.get(other.stream, 0) < other.seq:
                how = "writes" if writes else "reads"
                raise self.violate(
                    f"race: {what} {how} bytes {max(low, other.low)}..{min(high, other.high)} of {found}, which "
                    f"{other.label} on another stream {'writes' if other.writes else 'reads'} without an order "
                    "between them; let one stream wait for an event of the other"
                )
        for other in found.accesses:
            if (other.low, other.high, other.writes, other.stream) == (low, high, writes, by[0]):
                other.seq, other.label = by[1], what
                break
        else:
            found.accesses.append(Access(low, high, writes, by[0], by[1], what))
        return found.bytes[low:high]

    def forget_accesses(self, clock: Mapping[int, int]) -> None:
        """Drop the accesses that the host has waited for, when no work is left that could race with them."""
        for one in self._all:
            if one.accesses:
                one.accesses = [a for a in one.accesses if clock.get(a.stream, 0) < a.seq]

    def leaks(self) -> list[str]:
        """Return what is allocated still."""
        return [f"leak: {one}" for one in self._all if not one.freed_at]

    def check_guards(self) -> None:
        """Raise DoubleError if anything was written outside an allocation."""
        for one in self._all:
            self._check_guards(one)

    def _check_guards(self, one: Allocation) -> None:
        offset = one.broken_guard()
        if offset is not None:
            raise self.violate(f"byte {offset} was written, outside {one}")

    def _nearest(self, address: int) -> Allocation | None:
        at = bisect.bisect(self._addresses, address) - 1
        return self._all[at] if at >= 0 else None


def _rounded(size: int) -> int:
    return -(-size // _DEVICE_ALIGN) * _DEVICE_ALIGN


def caller() -> str:
    """Return the innermost lines of the program that are none of the double's own, "file:line function" each."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 3:
        name = frame.f_code.co_filename.rsplit("/", 1)[-1]
        if not name.startswith("fake_"):
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)
