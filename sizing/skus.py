"""The GPUs that plans are built for: memory, bandwidth and peaks of each, as NVIDIA's datasheets give them.

Bandwidths and peaks are decimal (1 GB/s = 1e9) and of dense products: where a datasheet gives "with sparsity" alone,
half of it. Products of float16 and FP8 add up in float32, which GeForce cards do at half the speed of float16 sums.
Memory is the total that nvidia-smi reports, less than the chips hold where a part goes to ECC.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping

from ..runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Sku:
    """One GPU as it is sold.

    name : as on the command line, e.g. "l40s"
    title : as people and nvidia-smi write it
    sm : compute capability, e.g. "sm89"
    memory_bytes : in total, as nvidia-smi reports it
    bandwidth_bytes_s : of that memory, bytes a second
    flops : dense operations a second by type of the factors ("float16", "int8", "fp8", "fp4"); those the silicon has
    source : where the numbers are from
    words : what a name of it may hold besides, in lower case, e.g. its form and kind of memory
    """

    name: str
    title: str
    sm: str
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: Mapping[str, float]
    source: str
    words: frozenset[str] = frozenset()


def _sku(
    sm: str,
    name: str,
    title: str,
    mib: int,
    gb_s: float,
    tera: tuple[float, ...],
    words: str,
    source: str = "",
) -> Sku:
    """Return a row of the table.

    tera : 1e12 operations a second of float16, int8, and where there are, fp8 and fp4
    source : "" is the datasheet of that title
    """
    peaks = zip(("float16", "int8", "fp8", "fp4"), tera, strict=False)
    return Sku(
        name=name,
        title=f"NVIDIA {title}",
        sm=sm,
        memory_bytes=mib << 20,
        bandwidth_bytes_s=gb_s * 1e9,
        flops={kind: value * 1e12 for kind, value in peaks},
        source=source or f"NVIDIA {title} datasheet",
        words=frozenset(words.split()),
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_GB202 = "NVIDIA RTX Blackwell architecture whitepaper"
_HGX_B200 = "NVIDIA Blackwell architecture technical brief: HGX B200, one of eight GPUs"
_HGX_B300 = "NVIDIA HGX B300 specifications, one of eight GPUs"
_HOPPER_TERA = (989, 1979, 1979)

SKUS: dict[str, Sku] = {
    one.name: one
    for one in (
        _sku("sm75", "t4", "T4", 15360, 320, (65, 130), "16g gddr6 pcie"),
        _sku("sm80", "a100-40g", "A100 40GB", 40960, 1555, (312, 624), "sxm sxm4 pcie hbm2", _A100),
        _sku("sm80", "a100-80g", "A100-SXM4-80GB", 81920, 2039, (312, 624), "sxm hbm2e", _A100),
        _sku("sm80", "a100-80g-pcie", "A100 80GB PCIe", 81920, 1935, (312, 624), "hbm2e", _A100),
        _sku("sm80", "a30", "A30", 24576, 933, (165, 330), "24g hbm2 pcie"),
        _sku("sm86", "a10", "A10", 23028, 600, (125, 250), "24g gddr6 pcie"),
        _sku("sm86", "a10g", "A10G", 23028, 600, (70, 140), "24g gddr6 pcie"),
        _sku("sm86", "a40", "A40", 46068, 696, (149.7, 299.3), "48g gddr6 pcie"),
        _sku("sm86", "rtx3090", "GeForce RTX 3090", 24576, 936, (71, 284), "24g gddr6x", _GA102),
        _sku("sm86", "rtx-a6000", "RTX A6000", 49140, 768, (154.8, 309.7), "48g gddr6", _GA102),
        _sku("sm89", "l4", "L4", 23034, 300, (121, 242, 242), "24g gddr6 pcie"),
        _sku("sm89", "l40", "L40", 46068, 864, (181, 362, 362), "48g gddr6 pcie"),
        _sku("sm89", "l40s", "L40S", 46068, 864, (362, 733, 733), "48g gddr6 pcie"),
        _sku("sm89", "rtx4090", "GeForce RTX 4090", 24564, 1008, (165.2, 660.6, 330.3), "24g gddr6x", _ADA),
        _sku("sm89", "rtx6000-ada", "RTX 6000 Ada", 49140, 960, (364.2, 728.5, 728.5), "48g gddr6"),
        _sku("sm90", "h100", "H100 80GB HBM3", 81559, 3350, _HOPPER_TERA, "sxm sxm5", _H100),
        _sku("sm90", "h100-pcie", "H100 PCIe", 81559, 2000, (756, 1513, 1513), "80g hbm2e", _H100),
        _sku("sm90", "h100-nvl", "H100 NVL", 95830, 3900, (835, 1670, 1670), "94g hbm3 pcie", _H100),
        _sku("sm90", "h200", "H200", 143771, 4800, _HOPPER_TERA, "141g hbm3e sxm sxm5"),
        _sku("sm90", "h20", "H20", 97871, 4000, (148, 296, 296), "96g hbm3 sxm sxm5"),
        _sku("sm90", "gh200", "GH200 480GB", 97871, 4000, _HOPPER_TERA, "96g hbm3"),
        _sku(
            "sm100", "b200", "B200", 183359, 7700, (2250, 4500, 4500, 9000), "180g hbm3e sxm sxm6", _HGX_B200
        ),
        # Few of its units are INT8's.
        _sku(
            "sm103",
            "b300",
            "B300",
            275040,
            8000,
            (2250, 150, 4500, 13500),
            "288g hbm3e sxm sxm6 ac",
            _HGX_B300,
        ),
        _sku(
            "sm120", "rtx5090", "GeForce RTX 5090", 32607, 1792, (209.5, 838, 419, 1676), "32g gddr7", _GB202
        ),
        # The editions differ in clocks, the server's in its memory's too.
        _sku(
            "sm120",
            "rtx6000-blackwell",
            "RTX PRO 6000 Blackwell",
            97887,
            1792,
            (503.8, 1007.6, 1007.6, 2015.2),
            "96g gddr7",
            _GB202,
        ),
        _sku(
            "sm120",
            "rtx6000-blackwell-maxq",
            "RTX PRO 6000 Blackwell Max-Q",
            97887,
            1792,
            (438.9, 877.7, 877.7, 1755.5),
            "96g gddr7",
            "NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet: 3511 TOPS of sparse FP4, of which the others are parts",
        ),
        _sku(
            "sm120",
            "rtx6000-blackwell-server",
            "RTX PRO 6000 Blackwell Server",
            97887,
            1597,
            (480, 960, 960, 1920),
            "96g gddr7 pcie",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition datasheet: 120 TFLOPS of FP32, times 4, 8 and 16",
        ),
    )
}
"""name -> GPU, by compute capability."""

# The maker, its brands, and editions that change none of these numbers.
_SMALL_WORDS = frozenset(
    {"nvidia", "geforce", "tesla", "gpu", "tensor", "core", "generation", "edition", "workstation"}
)


def find_sku(name: str) -> Sku:
    """Return the GPU of a name such as "l40s", "NVIDIA L40S", "A100-SXM4-80GB" or "a100-80g".

    raises InvalidArgumentError for a name that none has, with the nearest, or that several have, with all of them
    """
    words = _words(name)
    exact = [one for one in SKUS.values() if "".join(words) in map(_squeezed, (one.name, one.title))]
    found = exact or [one for one in SKUS.values() if words and set(words) <= _all_words(one)]
    if len(found) > 1:  # "h100-80g": one of them is called so but for its memory
        called = "".join(one for one in words if not re.fullmatch(r"\d+g", one))
        found = [one for one in found if _squeezed(one.name) == called] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgumentError(
            f"{name!r} may be {' or '.join(one.name for one in found)}, which differ in memory or speed; give one of "
            "these names"
        )
    near = difflib.get_close_matches("".join(words), [_squeezed(one) for one in SKUS], n=3, cutoff=0.5)
    nearest = [one for one in SKUS if _squeezed(one) in near]
    meant = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise InvalidArgumentError(f"no GPU is called {name!r}; {meant}There are {', '.join(SKUS)}")


def _words(name: str) -> list[str]:
    """Return what distinguishes a name: "NVIDIA A100-SXM4-80GB" -> a100, sxm4, 80g."""
    words = re.sub(r"rtx(?=\d)", "rtx ", name.lower()).replace("_", " ")
    parts = [re.sub(r"^(\d+)gi?b$", r"\1g", one) for one in re.split(r"[\s/()-]+", words) if one]
    return [one for one in parts if one not in _SMALL_WORDS]


def _squeezed(name: str) -> str:
    return "".join(_words(name))


def _all_words(sku: Sku) -> set[str]:
    return {*_words(sku.name), *_words(sku.title), *sku.words}
