"""Whether anything still runs in a server that was told to exit.

It waits by itself until its limit for connections that are merely open, and for streams whose model died.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .api import NoAnswer, TritonApi, counter_sum
from .canary import progress_of

_QUIET_S = 3.0  # longer than the engine's metrics lag behind it
_OURS = frozenset(("tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing", "ensemble"))
_ACTIVE = "nv_trt_llm_request_metrics"


class DrainWatch:
    """Asks the server's metrics, which it answers until its end, whether requests still run.

    names : the loaded models; those of others may work without showing it
    has_hung : streams of a model that died wait for it and always will
    """

    def __init__(self, api: TritonApi, names: Sequence[str], has_hung: bool) -> None:
        self._api = api
        self._names = tuple(names)
        self._has_hung = has_hung
        self._progress = -1.0
        self._quiet_since = time.monotonic()

    def is_over(self) -> bool:
        """Whether nothing has moved for a while, nor will; asks the server, within a second."""
        try:
            text = self._api.metrics(1.0)
        except NoAnswer:
            return False  # it is about to end
        progress = progress_of(text, self._names)
        if progress != self._progress or counter_sum(text, _ACTIVE, {"request_type": "active"}) > 0:
            self._progress, self._quiet_since = progress, time.monotonic()
        shows_all = _OURS.issuperset(self._names) and f"\n{_ACTIVE}{{" in text
        return (shows_all or self._has_hung) and time.monotonic() - self._quiet_since > _QUIET_S
