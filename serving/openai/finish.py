"""Why an output ended, in OpenAI's words."""

from __future__ import annotations

from .errors import ApiError
from .protocol import SamplingFields


def finish_of(
    reason: str | None, stop_reason: str | int | None, num_tokens: int
) -> tuple[str | None, str | int | None]:
    """Return finish_reason and stop_reason of a choice.

    num_tokens : of the output so far. A time-out with some is an answer that is cut: "length", stop_reason "timeout"
    raises ApiError 504 for a time-out before the first token, 503 for an output that the server's end cut off
    """
    if reason == "cancelled":
        raise ApiError(
            503,
            "the server ended while the request was running; send it again",
            code="shutting_down",
            headers={"Retry-After": "1"},
        )
    if reason != "timeout":
        return reason, stop_reason
    if not num_tokens:
        raise ApiError(
            504,
            "the request's time was over before its first token; allow more with timeout_ms, or try again later",
            code="timeout",
        )
    return "length", "timeout"


def stop_text(body: SamplingFields, stop: str | int | None) -> str:
    """Return the stop string that ended a text where the client wants to see it, else ""."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    wanted = body.include_stop_str_in_output and isinstance(stop, str) and stop in stops
    return str(stop) if wanted else ""
