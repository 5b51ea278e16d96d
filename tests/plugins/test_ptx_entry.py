"""Parameters in another order: what the code reads stays, what the assembler lays out changes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from plansmith.plugins.ptx_entry import at_most_version, named_by_content, reorder

triton = pytest.importorskip("triton")

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
CUOBJDUMP = PTXAS.with_name("cuobjdump")

# out[0] = a[0] + n; two parameters behind, as Triton's compiler adds them.
PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry add(
	.param .u64 .ptr .global .align 1 add_param_0,
	.param .u64 .ptr .global .align 1 add_param_1,
	.param .u32 add_param_2,
	.param .u64 .ptr .global .align 1 add_param_3,
	.param .u64 .ptr .global .align 1 add_param_4
)
.reqntid 32
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<3>;
	ld.param.b64 %rd1, [add_param_0];
	ld.param.b64 %rd2, [add_param_1];
	ld.param.b32 %r1, [add_param_2];
	ld.global.b32 %r2, [%rd2];
	add.s32 %r3, %r1, %r2;
	st.global.b32 [%rd1], %r3;
	ret;
}
"""
NAMES = ("out", "a", "n")


def offsets(ptx: str, folder: Path) -> list[tuple[int, int]]:
    """(offset, size) of each parameter in the assembled kernel."""
    (folder / "k.ptx").write_text(ptx)
    subprocess.run([PTXAS, "-arch=sm_80", folder / "k.ptx", "-o", folder / "k.cubin"], check=True)
    text = subprocess.run(
        [CUOBJDUMP, "-elf", folder / "k.cubin"], check=True, capture_output=True, text=True
    ).stdout
    found = re.findall(r"Ordinal\s*:\s*(0x\w+)\s+Offset\s*:\s*(0x\w+)\s+Size\s*:\s*(0x\w+)", text)
    by_ordinal = {int(n, 16): (int(at, 16), int(size, 16)) for n, at, size in found}
    return [by_ordinal[n] for n in sorted(by_ordinal)]


def loads(ptx: str, folder: Path) -> list[str]:
    """Constant bank addresses that the assembled kernel reads, of the parameters alone (from 0x160 on)."""
    offsets(ptx, folder)
    text = subprocess.run(
        [CUOBJDUMP, "-sass", folder / "k.cubin"], check=True, capture_output=True, text=True
    ).stdout
    return sorted({at for at in re.findall(r"c\[0x0\]\[(0x\w+)\]", text) if int(at, 16) >= 0x160})


def test_the_layout_is_the_callers(tmp_path: Path) -> None:
    assert offsets(PTX, tmp_path) == [(0, 8), (8, 8), (16, 4), (24, 8), (32, 8)]
    made = reorder(PTX, NAMES, ("a", None, "n", "out"))
    assert offsets(made, tmp_path) == [(0, 8), (8, 8), (16, 4), (24, 8)]
    assert loads(made, tmp_path) == [
        "0x160",
        "0x164",
        "0x170",
        "0x178",
        "0x17c",
    ]  # both halves of a; n; of out
    body = PTX[PTX.index(".reqntid") :]
    assert made.endswith(body)


def test_the_compilers_own_parameters_go(tmp_path: Path) -> None:
    assert offsets(reorder(PTX, NAMES, NAMES), tmp_path) == [(0, 8), (8, 8), (16, 4)]


@pytest.mark.parametrize(
    ("ptx", "order", "words"),
    [
        (PTX, ("a", "out"), "add takes out, a, n, the caller passes a, out"),
        (PTX, ("a", "out", "n", "n"), "the caller passes a, out, n, n"),
        (PTX.replace(".entry", ".func"), NAMES, "has 0 entries"),
        (PTX + PTX, NAMES, "has 2 entries"),
        (
            PTX.replace("[add_param_1]", "[add_param_3]"),
            NAMES,
            "add reads its parameter 3, which is none of out, a, n",
        ),
        (
            re.sub(r",\n\t.param .u32.*?_4", "", PTX, flags=re.DOTALL),
            NAMES,
            "add declares 2 parameters, 3 or more",
        ),
    ],
)
def test_what_does_not_fit(ptx: str, order: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reorder(ptx, NAMES, order)


def test_a_name_says_the_content(tmp_path: Path) -> None:
    moved = reorder(PTX, NAMES, ("a", None, "n", "out"))
    made, name = named_by_content(moved, "add")
    other, other_name = named_by_content(moved.replace("add.s32", "sub.s32"), "add")
    assert name.startswith("add_") and name != other_name and named_by_content(moved, "add") == (made, name)
    assert f".entry {name}(" in made and f"[{name}_param_1]" in made and f"{name}_unused_1" in made
    assert "add.s32" in made and "sub.s32" in other  # instructions keep their names
    assert offsets(made, tmp_path) == offsets(moved, tmp_path)


def test_a_newer_version_is_lowered_alone() -> None:
    assert at_most_version(PTX, (8, 8)) == PTX and at_most_version(PTX, (8, 0)) == PTX
    assert at_most_version(PTX.replace("8.0", "10.1"), (8, 8)) == PTX.replace("8.0", "8.8")
    with pytest.raises(ValueError, match="does not say its version"):
        at_most_version(PTX.replace(".version", "//"), (8, 8))
