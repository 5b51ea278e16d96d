"""The table of GPUs: names that people write, and numbers that agree with what the builder knows."""

from __future__ import annotations

import pytest
from plansmith.builder.targets.registry import target_names
from plansmith.builder.targets.rtx.targets import gpu_sm
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.sizing.skus import SKUS, Sku, find_sku


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("l40s", "l40s"),
        ("L40S", "l40s"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", "l40"),
        ("Tesla T4", "t4"),
        ("A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("a100_80g", "a100-80g"),
        ("A100-80GiB", "a100-80g"),
        ("h100-80g", "h100"),
        ("H100 80GB PCIe", "h100-pcie"),
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("H100 SXM5", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("rtx-5090", "rtx5090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("rtx6000ada", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx6000-blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx6000-blackwell-maxq"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx6000-blackwell-server"),
    ],
)
def test_names_that_people_and_nvidia_smi_write(name: str, found: str) -> None:
    assert find_sku(name) is SKUS[found]


@pytest.mark.parametrize("one", SKUS.values(), ids=SKUS)
def test_every_gpu_is_found_by_its_own_names_and_can_be_built_for(one: Sku) -> None:
    assert find_sku(one.name) is one and find_sku(one.title) is one
    assert one.sm in target_names()
    assert gpu_sm(one.title) == one.sm  # the builder's own table of names


@pytest.mark.parametrize("one", SKUS.values(), ids=SKUS)
def test_numbers_are_of_a_gpu(one: Sku) -> None:
    assert 14 << 30 <= one.memory_bytes <= 300 << 30
    assert 300e9 <= one.bandwidth_bytes_s <= 8e12
    assert one.flops["float16"] >= 60e12
    assert ("fp8" in one.flops) == (one.sm not in ("sm75", "sm80", "sm86"))
    assert ("fp4" in one.flops) == (one.sm in ("sm100", "sm103", "sm120"))
    assert one.source


def test_an_ambiguous_name_names_all() -> None:
    with pytest.raises(InvalidArgumentError, match="may be a100-40g or a100-80g or a100-80g-pcie"):
        find_sku("a100")
    with pytest.raises(InvalidArgumentError, match="may be rtx6000-ada or rtx6000-blackwell"):
        find_sku("RTX 6000")


@pytest.mark.parametrize(("name", "near"), [("h1000", "h100"), ("l40ss", "l40s"), ("rtx4091", "rtx4090")])
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"no GPU is called '{name}'; did you mean .*\b{near}\b"):
        find_sku(name)


@pytest.mark.parametrize("name", ["", "mi300", "NVIDIA"])
def test_names_of_nothing_get_the_list(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="here are t4, a100-40g"):
        find_sku(name)
