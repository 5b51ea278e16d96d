"""--memory and --workers."""

from __future__ import annotations

import pytest
from plansmith.fleet import budget
from plansmith.fleet.budget import Budget, make_budget, parse_bytes
from plansmith.runtime.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("8GiB", 8 << 30),
        ("500 MB", 500_000_000),
        ("2.5GB", 2_500_000_000),
        (" 16gib ", 16 << 30),
        ("1TB", 10**12),
        ("64KiB", 65536),
        ("7b", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "8 G",
        "-1GB",
        "0",
        "0.4",
        "8GiBs",
        "1e9",
        "nan",
        "inf",
        "1,5GB",
        "٣GB",
        "GB",
        "0x10",
        "9" * 400 + "GB",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--memory is .*a size above 0 such as 8GiB, 500MB"):
        parse_bytes(text)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: 1000)
    monkeypatch.setattr(budget, "usable_cores", lambda: 3)
    assert make_budget() == Budget(900, 3)
    assert make_budget("2KB", 7) == Budget(2000, 7)
    monkeypatch.setattr(budget, "usable_cores", lambda: 0.5)
    assert make_budget().workers == 1
