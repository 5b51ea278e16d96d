"""When the waiting tokens of a stream are sent: at once while that is cheap, together while it is not."""

from __future__ import annotations

import os

_SMOOTHING = 0.1  # weight of the newest cost in the running mean
# What this process spends on an answer, a server and its other models spend several times again.
_SHARE_OF_ALL_CORES = 0.015
_MOST = 0.25


def machine_share() -> float:
    """Return the share of one core's time that sending may take here: it grows with the cores, to a quarter."""
    return min(_MOST, _SHARE_OF_ALL_CORES * len(os.sched_getaffinity(0)))


class SendBudget:
    """Keeps the time spent sending below a share of all time. Any thread; its numbers may lag by a send.

    share : of one core's time that sending may take, (0, 1]; None = machine_share()
    most_s : the longest that a token waits for others, seconds
    """

    def __init__(self, share: float | None = None, most_s: float = 0.25) -> None:
        self._share = machine_share() if share is None else share
        self._most_s = most_s
        self._cost_s = 0.0

    def sent(self, seconds: float) -> None:
        """Note what one send cost: CPU time, as what it took by the clock is mostly waiting on a busy machine."""
        self._cost_s += (seconds - self._cost_s) * (_SMOOTHING if self._cost_s else 1.0)

    def interval_s(self, num_streams: int) -> float:
        """Return the least time between two sends of one stream while `num_streams` are open, seconds."""
        return min(self._most_s, self._cost_s * num_streams / self._share)
