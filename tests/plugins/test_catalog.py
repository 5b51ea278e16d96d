"""The catalog has every operator's kernels, told apart by their names, and describes functions that are there."""

from __future__ import annotations

import pathlib
import re

import pytest
from plansmith.plugins import catalog as catalog_module
from plansmith.plugins.aot import ALL_SMS
from plansmith.plugins.catalog import catalog, ops
from plansmith.runtime.executors.kernel_bundle import ArgumentEntry

_PLUGINS = pathlib.Path(catalog_module.__file__).parent


def test_every_folder_with_kernels_is_in_it() -> None:
    with_kernels = {path.parent.name for path in _PLUGINS.glob("*/*.py") if "@triton.jit" in path.read_text()}
    assert with_kernels <= set(ops()) and {"paged_attention", "sampling"} <= set(ops())


@pytest.mark.parametrize("sm", ALL_SMS)
def test_kernels_of_an_sm(sm: int) -> None:
    kernels = catalog(sm)
    names = [kernel.name for kernel in kernels]
    assert len(set(names)) == len(names)
    assert {kernel.op for kernel in kernels} == set(ops())
    for kernel in kernels:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", kernel.name) and kernel.min_sm <= sm
        module, function = kernel.function.split(":")
        source = (_PLUGINS / f"{module.replace('.', '/')}.py").read_text()
        assert f"@triton.jit\ndef {function}(" in source
        for name, type_ in kernel.signature.items():
            ArgumentEntry.read({"name": name, "type": type_}, kernel.name)
        assert not kernel.signature.keys() & kernel.constants.keys()
    assert catalog(sm, "sampling") == [kernel for kernel in kernels if kernel.op == "sampling"]


def test_one_name_is_one_kernel_on_every_sm() -> None:
    seen: dict[str, object] = {}
    for sm in ALL_SMS:
        for kernel in catalog(sm):
            assert seen.setdefault(kernel.name, kernel) == kernel
