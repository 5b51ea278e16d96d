"""Work side by side in threads, a bounded number of pieces at once."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """Return work(item) of each item, in order; at most 2 * jobs items are taken before their results are.

    The first error ends it: pieces that run are waited for, the others are not begun.
    """
    waiting: collections.deque[Future[Result]] = collections.deque()
    with ThreadPoolExecutor(jobs, "plansmith-store") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= 2 * jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
