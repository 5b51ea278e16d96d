"""Stream capture and graphs of the double's driver. Captures of one stream only: forks are an error of the double."""

from __future__ import annotations

import threading
from typing import Any

import cuda.bindings.driver as real
from fake_calls import driver_call
from fake_memory import caller
from fake_streams import Capture, Event, Graph, Stream

_MODES = {0: "global", 1: "thread_local", 2: "relaxed"}


class GraphExec:
    """An instantiated graph."""

    def __init__(self, graph: Graph) -> None:
        self.works = list(graph.works)
        self.launches = 0
        self.made_at = caller()


class Graphs:
    """The functions of captures and graphs."""

    streams: Any
    handles: Any
    memory: Any

    def capture_error(self: Any, waiting_for: Stream | None = None) -> str | None:
        """Return the error of a call that a capture forbids, after it has spoilt the capture.

        waiting_for : the stream that is waited for; None = the call is unsafe beside any capture
        """
        for stream in self.streams.all:
            capture = stream.capture
            if capture is None:
                continue
            own = capture.thread == threading.get_ident()
            forbids = capture.mode == "global" or (capture.mode == "thread_local" and own)
            if stream is waiting_for or (waiting_for is None and forbids):
                capture.invalid = f"a call that is not allowed while a stream is captured, at {caller()}"
                self.memory.violations.append(f"capture: {capture.invalid}")
                return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        return None

    def wait_in_capture(self, stream: Stream, event: Event) -> str | None:
        """CuStreamWaitEvent on a stream that is captured."""
        assert stream.capture is not None
        if getattr(event, "captured_in", None) is stream.capture:
            return None
        stream.capture.invalid = "it waits for an event that was recorded outside of it"
        return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"

    def record_in_capture(self, stream: Stream, event: Event) -> str | None:
        """CuEventRecord on a stream that is captured: the event belongs to the capture, and marks nothing outside."""
        event.captured_in = stream.capture  # type: ignore[attr-defined]
        event.record = None
        return None

    @driver_call()
    def cuStreamBeginCapture(self: Any, hStream, mode):
        stream = self.stream(hStream)
        if stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if stream is self.streams.default:
            return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        if stream.capture is not None:
            return "CUDA_ERROR_ILLEGAL_STATE"
        stream.capture = Capture(_MODES[int(mode)], threading.get_ident())

    @driver_call(1, release=True)
    def cuStreamEndCapture(self: Any, hStream):
        stream = self.stream(hStream)
        if stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if stream.capture is None:
            return "CUDA_ERROR_ILLEGAL_STATE"
        capture, stream.capture = stream.capture, None
        if capture.invalid:
            return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            return "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"
        return self._new("graph", Graph(capture.works))

    @driver_call(1)
    def cuStreamIsCapturing(self: Any, hStream):
        stream = self.stream(hStream)
        if stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        status = real.CUstreamCaptureStatus
        if stream.capture is None:
            return status.CU_STREAM_CAPTURE_STATUS_NONE
        if stream.capture.invalid:
            return status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        return status.CU_STREAM_CAPTURE_STATUS_ACTIVE

    @driver_call(1, unsafe=True)
    def cuGraphInstantiate(self: Any, hGraph, flags):
        graph = self._object("graph", hGraph)
        if graph is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        return self._new("exec", GraphExec(graph))

    @driver_call(1)
    def cuGraphExecUpdate(self: Any, hGraphExec, hGraph):
        executable, graph = self._object("exec", hGraphExec), self._object("graph", hGraph)
        if executable is None or graph is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        kinds = [[work.label.split(" (")[0] for work in one.works] for one in (executable, graph)]
        if kinds[0] != kinds[1]:
            return "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE"
        executable.works = list(graph.works)
        return real.CUgraphExecUpdateResultInfo()

    @driver_call()
    def cuGraphUpload(self: Any, hGraphExec, hStream):
        if self._object("exec", hGraphExec) is None or self.stream(hStream) is None:
            return "CUDA_ERROR_INVALID_HANDLE"

    @driver_call()
    def cuGraphLaunch(self: Any, hGraphExec, hStream):
        executable, stream = self._object("exec", hGraphExec), self.stream(hStream)
        if executable is None or stream is None:
            return "CUDA_ERROR_INVALID_HANDLE"
        if stream.capture is not None:
            raise self.memory.violate("a graph was launched into a capture: the double has no child graphs")
        executable.launches += 1
        for work in executable.works:
            self.streams.enqueue(stream, work)

    @driver_call(release=True)
    def cuGraphDestroy(self: Any, hGraph):
        return self._remove("graph", hGraph)

    @driver_call(release=True)
    def cuGraphExecDestroy(self: Any, hGraphExec):
        return self._remove("exec", hGraphExec)
