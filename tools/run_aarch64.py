"""Run a static aarch64 Linux program on a processor that Unicorn emulates, with the few system calls our tests make.

    python tools/run_aarch64.py [--no-dotprod] PROGRAM [ARGUMENT ...]

Exits with the program's status. Needs `pip install unicorn`. The processor is QEMU's "max" (NEON, dot products, half
floats); what the program is told of it (AT_HWCAP) is floating point and NEON, and dot products if wanted.
Threads take turns: one runs until it waits for another or is about to begin an atomic change, before which it lets the
others run. That is the same order every time, and work that is shared by a counter is shared among all. Each look at a
clock finds it a millisecond later, whatever ran between: who spins for some time gives up and sleeps. Of the
environment the program gets TMPDIR and what begins with PLANSMITH_.
"""

import os
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicorn import UC_ARCH_ARM64, UC_HOOK_CODE, UC_HOOK_INTR, UC_MODE_ARM, Uc, UcError
from unicorn import arm64_const as arm
from unicorn.unicorn import UcContext

PAGE = 4096
STACK_TOP, STACK_BYTES = 0x7FFF_0000_0000, 8 << 20
HEAP, MAPS = 0x10_0000_0000, 0x20_0000_0000  # where brk starts, where mmap starts
HWCAP_FP_ASIMD, HWCAP_ASIMDDP = 0b11, 1 << 20
AT_NULL, AT_PHDR, AT_PHENT, AT_PHNUM, AT_PAGESZ, AT_ENTRY, AT_HWCAP, AT_RANDOM = 0, 3, 4, 5, 6, 9, 16, 25
EBADF, EAGAIN, ENOTTY, ENOSYS = 9, 11, 25, 38
SYSTEM_CALL, YIELDED = 2, 0x1_0004  # QEMU's numbers of exceptions
EXECUTABLE, LOAD_MASK, LOAD_EXCLUSIVE = 1, 0x3FFF_7C00, 0x085F_7C00  # LDXR, LDAXR of any size
CLONE_PARENT_SETTID, CLONE_CHILD_CLEARTID = 0x10_0000, 0x20_0000
FUTEX_WAIT, FUTEX_WAKE, FUTEX_REQUEUE, FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET = 0, 1, 3, 9, 10
REGISTERS = [getattr(arm, f"UC_ARM64_REG_X{i}") for i in range(6)]


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


@dataclass
class Thread:
    """A thread that is not running: its registers, and what it waits for (the address of a futex, 0 = nothing)."""

    tid: int
    cleared_at_exit: int = 0  # where the kernel writes 0 then
    registers: UcContext | None = None
    futex: int = 0
    gave_way: bool = False  # before the atomic change that it is about to begin


class Program:
    """A loaded program; `run()` returns its exit status."""

    def __init__(self, path: Path, arguments: list[str], dotprod: bool) -> None:
        self._cpu = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._cpu.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        self._cpu.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point and NEON are not trapped
        self._heap, self._mapped, self._milliseconds = HEAP, MAPS, 0
        self._status: int | None = None  # of the program, when it has ended
        self._thread, self._others, self._last_tid = Thread(tid=1), deque[Thread](), 1
        auxv = self._load(path.read_bytes())
        auxv[AT_HWCAP] = HWCAP_FP_ASIMD | (HWCAP_ASIMDDP if dotprod else 0)
        self._push([str(path), *arguments], auxv)
        self._calls: dict[int, Callable[..., int]] = {
            29: lambda *_: -ENOTTY,  # ioctl
            35: self._unlink,
            46: lambda fd, size, *_: os.ftruncate(fd, size) or 0,
            56: self._open,
            57: lambda fd, *_: os.close(fd) or 0,
            62: lambda fd, offset, whence, *_: os.lseek(fd, offset, whence),
            63: self._read,
            64: lambda fd, at, size, *_: os.write(fd, bytes(self._cpu.mem_read(at, size))),
            65: self._readv,
            66: self._writev,
            93: self._exit_thread,
            94: self._exit,
            96: self._set_tid_address,
            98: self._futex,
            113: self._clock,
            122: lambda *_: 0,  # sched_setaffinity
            123: lambda _pid, _size, at, *_: self._write(at, struct.pack("<Q", 1)) or 8,  # sched_getaffinity
            124: lambda *_: self._cpu.emu_stop() or 0,  # sched_yield
            134: lambda *_: 0,  # rt_sigaction
            135: lambda *_: 0,  # rt_sigprocmask
            172: lambda *_: 1,  # getpid
            178: lambda *_: self._thread.tid,  # gettid
            214: self._brk,
            215: self._unmap,
            220: self._clone,
            222: self._map,
            226: lambda *_: 0,  # mprotect
            233: lambda *_: 0,  # madvise
        }
        self._cpu.hook_add(UC_HOOK_INTR, self._exception)
        for at in self._atomics:
            self._cpu.hook_add(UC_HOOK_CODE, self._give_way, begin=at, end=at)

    def run(self) -> int:
        """Run to the end and return the exit status: 139 after a fault, 138 when all threads wait."""
        at = self._entry
        while self._status is None:
            try:
                self._cpu.emu_start(at, 0)
            except UcError as error:
                at = self._cpu.reg_read(arm.UC_ARM64_REG_PC)
                print(f"run_aarch64: {error} at {at:#x}", file=sys.stderr)
                return 139
            if self._status is None:
                self._next_thread()
            at = self._cpu.reg_read(arm.UC_ARM64_REG_PC)
        return self._status

    def _next_thread(self) -> None:
        """Put the running thread, unless it has ended, behind the others, and take the first that waits for nothing."""
        if self._thread.tid:
            self._thread.registers = self._cpu.context_save()
            self._others.append(self._thread)
        for _ in range(len(self._others)):
            self._thread = self._others.popleft()
            if not self._thread.futex and self._thread.registers is not None:
                self._cpu.context_restore(self._thread.registers)
                return
            self._others.append(self._thread)
        print("run_aarch64: every thread waits for another", file=sys.stderr)
        self._status = 138

    def _give_way(self, _cpu: Uc, _at: int, _size: int, _data: object) -> None:
        thread = self._thread
        thread.gave_way = not thread.gave_way and any(not other.futex for other in self._others)
        if thread.gave_way:
            self._cpu.emu_stop()  # comes back here

    # ------------------------------------------------------------ memory

    def _load(self, elf: bytes) -> dict[int, int]:
        """Map the program's segments and return what the auxiliary vector says of them."""
        if elf[:5] != b"\x7fELF\x02" or struct.unpack_from("<HH", elf, 16) != (2, 183):
            raise SystemExit("run_aarch64: not a static aarch64 program; link it with -static")
        self._entry, headers = struct.unpack_from("<QQ", elf, 24)
        entry_size, count = struct.unpack_from("<HH", elf, 54)
        pages: set[int] = set()
        self._atomics: list[int] = []  # load-exclusive instructions: an atomic change begins with one
        for i in range(count):
            segment = struct.unpack_from("<IIQQQQQ", elf, headers + i * entry_size)
            kind, permissions, offset, address, _, in_file, in_memory = segment
            if kind != 1:
                continue
            first = address // PAGE
            for page in range(first, (address + in_memory - 1) // PAGE + 1):
                if page not in pages:
                    self._cpu.mem_map(page * PAGE, PAGE)
                    pages.add(page)
            self._write(address, elf[offset : offset + in_file])
            if permissions & EXECUTABLE:
                words = struct.unpack_from(f"<{in_file // 4}I", elf, offset)
                loads = [i for i, word in enumerate(words) if word & LOAD_MASK == LOAD_EXCLUSIVE]
                self._atomics += [address + 4 * i for i in loads]
            if offset <= headers < offset + in_file:
                phdr = address + headers - offset
        return {AT_PHDR: phdr, AT_PHENT: entry_size, AT_PHNUM: count, AT_PAGESZ: PAGE, AT_ENTRY: self._entry}

    def _push(self, arguments: list[str], auxv: dict[int, int]) -> None:
        """Lay out the stack that a program starts with: argc, argv, the environment, the auxiliary vector."""
        self._cpu.mem_map(STACK_TOP - STACK_BYTES, STACK_BYTES)
        names = [name for name in os.environ if name == "TMPDIR" or name.startswith("PLANSMITH_")]
        at, words = STACK_TOP - 4 * PAGE, [len(arguments)]
        auxv[AT_RANDOM] = STACK_TOP - 16
        for texts in (arguments, [f"{name}={os.environ[name]}" for name in names]):
            for text in texts:
                data = text.encode() + b"\0"
                self._write(at, data)
                words.append(at)
                at += len(data)
            words.append(0)
        for key, value in auxv.items():
            words += [key, value]
        words += [AT_NULL, 0]
        stack = STACK_TOP - 4 * PAGE - _pages(8 * len(words))
        self._write(stack, struct.pack(f"<{len(words)}Q", *words))
        self._cpu.reg_write(arm.UC_ARM64_REG_SP, stack)

    def _write(self, at: int, data: bytes) -> None:
        self._cpu.mem_write(at, data)

    def _text(self, at: int) -> str:
        text = b""
        while not text.endswith(b"\0"):
            text += bytes(self._cpu.mem_read(at + len(text), 1))
        return text[:-1].decode()

    # ------------------------------------------------------------ system calls

    def _exception(self, _cpu: Uc, number: int, _data: object) -> None:
        if number == SYSTEM_CALL:
            self._system_call()
        elif number != YIELDED:
            at = self._cpu.reg_read(arm.UC_ARM64_REG_PC)
            print(f"run_aarch64: exception {number} at {at:#x}", file=sys.stderr)
            self._exit(139)

    def _system_call(self) -> None:
        call = self._cpu.reg_read(arm.UC_ARM64_REG_X8)
        arguments = [self._cpu.reg_read(register) for register in REGISTERS]
        signed = [x - (1 << 64) if x >> 63 else x for x in arguments]
        handler = self._calls.get(call)
        if handler is None:
            print(f"run_aarch64: system call {call} is not emulated", file=sys.stderr)
        try:
            result = -ENOSYS if handler is None else handler(*signed)
        except OSError as error:
            result = -(error.errno or EBADF)
        self._cpu.reg_write(arm.UC_ARM64_REG_X0, result & (1 << 64) - 1)

    def _exit(self, status: int, *_: int) -> int:
        self._status = status & 255
        self._cpu.emu_stop()
        return 0

    def _exit_thread(self, status: int, *_: int) -> int:
        if not self._others:
            return self._exit(status)
        if self._thread.cleared_at_exit:
            self._write(self._thread.cleared_at_exit, bytes(4))
            self._wake(self._thread.cleared_at_exit, 1)
        self._thread.tid = 0
        self._cpu.emu_stop()
        return 0

    def _set_tid_address(self, at: int, *_: int) -> int:
        self._thread.cleared_at_exit = at
        return self._thread.tid

    def _clone(self, flags: int, stack: int, tid_at: int, tls: int, cleared: int, *_: int) -> int:
        self._last_tid += 1
        thread = Thread(self._last_tid, cleared if flags & CLONE_CHILD_CLEARTID else 0)
        if flags & CLONE_PARENT_SETTID:
            self._write(tid_at, struct.pack("<i", thread.tid))
        new = {arm.UC_ARM64_REG_SP: stack, arm.UC_ARM64_REG_TPIDR_EL0: tls, arm.UC_ARM64_REG_X0: 0}
        own = {register: self._cpu.reg_read(register) for register in new}
        for register, value in new.items():
            self._cpu.reg_write(register, value)
        thread.registers = self._cpu.context_save()
        for register, value in own.items():
            self._cpu.reg_write(register, value)
        self._others.append(thread)
        return thread.tid

    def _futex(self, at: int, operation: int, value: int, _timeout: int, other: int, _value3: int) -> int:
        operation &= 127  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
        if operation in (FUTEX_WAIT, FUTEX_WAIT_BITSET):
            if bytes(self._cpu.mem_read(at, 4)) != struct.pack("<I", value & 0xFFFF_FFFF):
                return -EAGAIN
            self._thread.futex = at
            self._cpu.emu_stop()
            return 0
        woken = self._wake(at, value)
        if operation == FUTEX_REQUEUE:
            for thread in self._others:
                if thread.futex == at:
                    thread.futex = other
        return woken if operation in (FUTEX_WAKE, FUTEX_WAKE_BITSET, FUTEX_REQUEUE) else -ENOSYS

    def _wake(self, at: int, most: int) -> int:
        waiting = [thread for thread in self._others if thread.futex == at][: max(most, 0)]
        for thread in waiting:
            thread.futex = 0
        return len(waiting)

    def _brk(self, end: int, *_: int) -> int:
        if end > self._heap:
            if _pages(end) > _pages(self._heap):
                self._cpu.mem_map(_pages(self._heap), _pages(end) - _pages(self._heap))
            self._heap = end
        return self._heap

    def _map(self, _at: int, size: int, _protection: int, _flags: int, fd: int, offset: int) -> int:
        at, size = self._mapped, _pages(size)
        self._cpu.mem_map(at, size)
        self._mapped += size + PAGE  # a gap: writing past the end is an error
        if fd & 0xFFFFFFFF != 0xFFFFFFFF:
            self._write(at, os.pread(fd, size, offset))
        return at

    def _unmap(self, at: int, size: int, *_: int) -> int:
        self._cpu.mem_unmap(at, _pages(size))
        return 0

    def _open(self, _folder: int, path: int, flags: int, mode: int, *_: int) -> int:
        # Linux numbers O_LARGEFILE and its neighbours differently on each processor; the rest are alike.
        common = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_APPEND
        return os.open(self._text(path), flags & common, mode)

    def _unlink(self, _folder: int, path: int, *_: int) -> int:
        Path(self._text(path)).unlink()
        return 0

    def _read(self, fd: int, at: int, size: int, *_: int) -> int:
        data = os.read(fd, size)
        self._write(at, data)
        return len(data)

    def _vectors(self, at: int, count: int) -> list[tuple[int, int]]:
        return list(struct.iter_unpack("<QQ", bytes(self._cpu.mem_read(at, 16 * count))))

    def _readv(self, fd: int, at: int, count: int, *_: int) -> int:
        total = 0
        for start, size in self._vectors(at, count):
            total += self._read(fd, start, size) if size else 0
        return total

    def _writev(self, fd: int, at: int, count: int, *_: int) -> int:
        parts = (self._cpu.mem_read(start, size) for start, size in self._vectors(at, count))
        return os.write(fd, b"".join(map(bytes, parts)))

    def _clock(self, _clock: int, at: int, *_: int) -> int:
        self._milliseconds += 1
        self._write(at, struct.pack("<QQ", self._milliseconds // 1000, self._milliseconds % 1000 * 1_000_000))
        return 0


def main(arguments: list[str]) -> int:
    """Run the program that the command line names and return its status."""
    dotprod = "--no-dotprod" not in arguments
    arguments = [argument for argument in arguments if argument != "--no-dotprod"]
    if not arguments:
        raise SystemExit(__doc__)
    return Program(Path(arguments[0]), arguments[1:], dotprod).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
