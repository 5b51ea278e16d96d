"""Versions, drivers and platforms as people write them."""

from __future__ import annotations

import pytest
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.sizing import releases


@pytest.mark.parametrize(
    ("compiler", "made", "there", "same"),
    [
        ("tensorrt_rtx", "1.7.1.116", "1.7.1.116", True),
        ("tensorrt_rtx", "1.7.1.116", "1.7.1.5", True),
        ("tensorrt_rtx", "1.7.1.116", "1.7", True),
        ("tensorrt_rtx", "1.7.1.116", "1.7.0.116", False),
        ("tensorrt_rtx", "1.7.1.116", "1.17.1", False),
        ("tensorrt_rtx", "1.7.1.116", "2", False),
        ("tensorrt", "11.4.0.106", "11.4.0.106", True),
        ("tensorrt", "11.4.0.106", "11.4.0.107", False),
        ("tensorrt", "11.4.0.106", "11.4.0.106.post1", True),
        ("tensorrt", "11.4.0", "11.4.0.106", True),
        ("tensorrt", "unknown", "11.4.0.106", True),
    ],
)
def test_releases(compiler: str, made: str, there: str, same: bool) -> None:
    assert releases.is_same_release(compiler, made, there) == same
    assert releases.is_same_release(compiler, there, made) == same


def test_the_part_that_counts() -> None:
    assert releases.release("tensorrt_rtx", "1.7.1.116") == "1.7.1"
    assert releases.release("tensorrt", "11.4.0.106") == "11.4.0.106"
    assert releases.release("tensorrt", "unknown") == "unknown"
    assert releases.tells_release("tensorrt_rtx", "1.7.1")
    assert not releases.tells_release("tensorrt", "11.4.0")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("580", (580,)),
        ("580.65", (580, 65)),
        ("580.65.06", (580, 65, 6)),
        ("r580", (580,)),
        (" R575 ", (575,)),
    ],
)
def test_drivers(text: str, numbers: tuple[int, ...]) -> None:
    assert releases.parse_driver(text) == numbers


@pytest.mark.parametrize(
    "text", ["", "13.0", "12", "cuda13", "580.", "580.1.2.3", "5800", "-580", "580\n1", "५८०"]
)
def test_what_is_no_driver(text: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"is no version of an NVIDIA driver; give one such as 580\.65\.06"
    ):
        releases.parse_driver(text)


def test_platforms() -> None:
    assert releases.parse_platform(" Linux-x86_64") == "linux-x86_64"
    assert releases.parse_platform("windows-aarch64") == "windows-aarch64"
    for text in ("", "linux", "linux-amd64", "macos-aarch64", "linux-x86_64-gnu"):
        with pytest.raises(InvalidArgumentError, match=r"is not known; give linux or windows"):
            releases.parse_platform(text)


def test_cuda_of_drivers() -> None:
    assert releases.takes_cuda((13, 0), 13) and releases.takes_cuda((13, 2), 12)
    assert not releases.takes_cuda((12, 9), 13)
    assert releases.cuda_branch("tensorrt_rtx", 13) == 580
    assert releases.cuda_branch("tensorrt", 12) == 535
    assert releases.cuda_branch("tensorrt", 99) is None
