"""How the double's driver takes a call: counted, failed on demand, refused where the real driver refuses it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass
class Failure:
    """The nth call from now on (1 = the next) of a name, or of any name, fails with an error."""

    name: str | None
    nth: int
    error: str | None


class Calls:
    """Counts calls by name and says which of them fails.

    names : every call so far, in order
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self._failures: list[Failure] = []

    def fail(self, name: str | None = None, nth: int = 1, error: str | None = None) -> None:
        """Let the nth call from now on of `name` (None = of any name) fail.

        error : the name of a CUresult; None = out of memory for allocations, else "unknown error"
        """
        self._failures.append(Failure(name, nth, error))

    def enter(self, name: str) -> Failure | None:
        """Count a call; return its failure if it has to fail."""
        self.names.append(name)
        self.counts[name] += 1
        hit = None
        for one in self._failures:
            if one.name in (None, name):
                one.nth -= 1
                if one.nth == 0:
                    hit = one
        if hit is not None:
            self._failures.remove(hit)
            self.failed.append(name)
        return hit


def driver_call(
    results: int = 0,
    *,
    needs: str = "context",
    unsafe: bool = False,
    release: bool = False,
) -> Callable[[F], F]:
    """Make a method a driver call that returns (error, result...).

    results : how many follow the error; None each where it fails
    needs : "nothing", "init" or "context" (current in the calling thread)
    unsafe : not allowed while a capture forbids it
    release : does its work even where it has to fail, as the driver does when it reports earlier errors
    """

    def decorate(method: F) -> F:
        name = method.__name__
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            signature.bind(self, *args, **kwargs)  # TypeError as the real function's
            with self.lock:
                self.check_present()
                failure = self.calls.enter(name)
                error = self.state_error(needs, unsafe)
                if error is None and failure is not None and not release:
                    error = failure.error or _usual_error(name)
                if error is not None and not (release and self.streams.fault):
                    return (self.error(error), *[None] * results)
                done = method(self, *args, **kwargs)
                fault = self.fault_error() if needs != "nothing" else None
                error = fault or (failure and (failure.error or _usual_error(name)))
                if isinstance(done, str):
                    return (self.error(error or done), *[None] * results)
                out = done if isinstance(done, tuple) else () if done is None else (done,)
                if error:
                    for one in out if release else ():
                        self.handles.forget(int(one))  # the caller never gets it
                    return (self.error(error), *[None] * results)
                assert len(out) == results, name
                return (self.error("CUDA_SUCCESS"), *out)

        call.num_results = results  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def _usual_error(name: str) -> str:
    makes = ("Alloc", "Create", "Instantiate", "LoadData", "CtxRetain")
    allocates = any(word in name for word in makes)
    return "CUDA_ERROR_OUT_OF_MEMORY" if allocates else "CUDA_ERROR_UNKNOWN"


class Handles:
    """Handle numbers of the double's objects, by kind; a number is never used again."""

    def __init__(self) -> None:
        self._next = 0x5000_0000
        self._live: dict[str, dict[int, Any]] = {}
        self._gone: dict[str, set[int]] = {}
        self._lock = threading.Lock()

    def add(self, kind: str, one: Any) -> int:
        """Return the number of a new object."""
        with self._lock:
            self._next += 16
            self._live.setdefault(kind, {})[self._next] = one
            return self._next

    def get(self, kind: str, number: int) -> Any | None:
        """Return the object, None where there is none (any more)."""
        return self._live.get(kind, {}).get(number)

    def remove(self, kind: str, number: int) -> Any | None:
        """Forget an object and return it."""
        one = self._live.get(kind, {}).pop(number, None)
        if one is not None:
            self._gone.setdefault(kind, set()).add(number)
        return one

    def forget(self, number: int) -> None:
        """Drop an object that nobody was given."""
        for live in self._live.values():
            live.pop(number, None)

    def was(self, kind: str, number: int) -> bool:
        """Return whether the number was an object's that has been destroyed."""
        return number in self._gone.get(kind, ())

    def live(self) -> list[tuple[str, int, Any]]:
        """Return all that was not destroyed."""
        return [(kind, number, one) for kind, live in self._live.items() for number, one in live.items()]
