"""Where a stage runs: a CUDA device, timed by its events, or the CPU in a dry run, where times mean nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
"""Written between two timed calls: four times the L2 of an H200 (60 MB), so that no input is still in it."""


class Device:
    """The device of a stage: random tensors on it, and the time that functions take there. One thread."""

    def __init__(self, dry_run: bool, seed: int = 0, shard: int = 0, num_shards: int = 1) -> None:
        """Seed the generator of all inputs; a dry run stays on the CPU.

        shard : which of num_shards processes of the stage this is; each takes its share of the cases
        """
        self.dry_run, self.seed, self.shard, self.num_shards = dry_run, seed, shard, num_shards
        self.name = "cpu" if dry_run else "cuda"
        self.random = torch.Generator(self.name).manual_seed(seed + 1000 * shard)
        self._flush = None if dry_run else torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._copy_rate: float | None = None

    def dtypes(self) -> tuple[str, ...]:
        """Return the types to try. The interpreter has no bfloat16: it multiplies bits and cuts off."""
        return ("fp16",) if self.dry_run else ("bf16", "fp16")

    def sm(self) -> int:
        """Return the compute capability, of which kernels choose their tiles; 80 in a dry run."""
        if self.dry_run:
            return 80
        major, minor = torch.cuda.get_device_capability()
        return major * 10 + minor

    def pick(self, full: Any, tiny: Any) -> Any:
        """Return `full` on a GPU and `tiny` in a dry run."""
        return tiny if self.dry_run else full

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        """Return normal random numbers of a shape, made in float32 in pieces of 2^28 so that large tensors fit."""
        out = torch.empty(shape, dtype=dtype, device=self.name)
        for piece in out.view(-1).split(2**28):
            drawn = torch.randn(piece.shape, generator=self.random, device=self.name)
            piece.copy_(drawn.mul_(scale))
        return out

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Return random integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.random, device=self.name, dtype=dtype)

    def permutation(self, n: int) -> torch.Tensor:
        """Return 0..n-1 in random order, int32."""
        return torch.randperm(n, generator=self.random, device=self.name).int()

    def synchronize(self) -> None:
        """Wait for the device; its errors come here."""
        if not self.dry_run:
            torch.cuda.synchronize()

    def times(
        self,
        functions: Mapping[str, Callable[[], Any]],
        rounds: int = 15,
        graph: bool = True,
        before: Mapping[str, Callable[[], Any]] | None = None,
        flush: bool = True,
    ) -> dict[str, float]:
        """Return the median seconds of each function on the device, all of them in turn in every round.

        graph : capture each function and time its replay, so that what the host does to launch it is not in the time
        before : what is called, untimed and not captured, before each call of a function
        flush : write over the L2 before each timed call
        """
        before = before or {}
        calls = {
            name: self._prepared(function, graph, before.get(name, _nothing))
            for name, function in functions.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 if self.dry_run else rounds):
            for name, call in calls.items():
                before.get(name, _nothing)()
                samples[name].append(self._time_once(call, flush))
        return {name: statistics.median(values) for name, values in samples.items()}

    def _prepared(
        self, function: Callable[[], Any], graph: bool, before: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return the function warmed up (kernels compiled, handles made), as a graph's replay where that is wanted."""
        if self.dry_run:
            return function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                before()
                function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if not graph:
            return function
        before()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            function()
        before()
        captured.replay()
        torch.cuda.synchronize()
        return captured.replay

    def _time_once(self, call: Callable[[], Any], flush: bool) -> float:
        """Return the seconds of one call."""
        if self._flush is None:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if flush:
            self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def copy_rate(self) -> float:
        """Return the bytes a second, read and written, of the device's own copy of 4 GiB; measured once a process."""
        if self._copy_rate is None:
            size = self.pick(4 * 2**30, 2**20)
            source = self.normal(size // 4)
            target = torch.empty_like(source)
            seconds = self.times({"copy": lambda: target.copy_(source)}, graph=False)["copy"]
            self._copy_rate = 2 * size / seconds
        return self._copy_rate


def _nothing() -> None:
    """Do nothing before a call."""
