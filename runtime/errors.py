"""The errors of plansmith: one tree, the same kinds as the C API's status codes."""

from __future__ import annotations

from collections.abc import Sequence


class Error(RuntimeError):
    """Base of all plansmith errors. A message says what, got, wanted and the next step."""


class InvalidArgumentError(Error, ValueError):
    """An argument, option or request parameter is not valid."""


class ShapeError(Error, ValueError):
    """A length or shape is outside the engine's limits."""


class EngineFileError(Error):
    """A file of an engine directory is missing, damaged or of another version."""


class CheckpointError(Error):
    """A checkpoint cannot be read, is damaged, or is of a kind that is not supported."""


class BuildError(Error):
    """A compiler failed. `log_lines` holds the last lines of its log."""

    def __init__(self, message: str, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.log_lines = tuple(log_lines)


class OutOfMemoryError(Error, MemoryError):
    """Memory, disk space or KV blocks do not suffice."""


class QueueFullError(Error):
    """The request queue is full; try again later."""


class NotFoundError(Error, LookupError):
    """There is no such request or adapter."""


class ShutdownError(Error):
    """The engine is shutting down."""


class ExecutorError(Error):
    """The executor failed in a step."""


class UnsupportedError(Error):
    """The build, machine or installation cannot do that."""


class BufferTooSmallError(Error):
    """A buffer is too small; the needed size was returned."""


class CudaError(Error):
    """A CUDA call failed."""


class InternalError(Error):
    """A bug in plansmith."""


# Code of the C API (PSM_STATUS_LIST in plansmith.h) -> class; a test compares the two.
STATUS_CLASSES: dict[int, type[Error]] = {
    1: InvalidArgumentError,
    2: ShapeError,
    3: EngineFileError,
    4: OutOfMemoryError,
    5: QueueFullError,
    6: NotFoundError,
    7: ShutdownError,
    8: ExecutorError,
    9: UnsupportedError,
    10: BufferTooSmallError,
    11: CudaError,
    12: InternalError,
}
