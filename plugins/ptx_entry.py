"""The parameters of a kernel's PTX in the order that a caller passes them.

Whoever launches a kernel for us has an order of his own: a TensorRT plugin's kernel is given its inputs, then numbers,
then its outputs, an output in place once more beside its input. PTX names its parameters, so their declarations can be
put in another order, with unused ones between, and the code stays as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_ENTRY = re.compile(r"(\.visible \.entry (\w+)\()([^)]*)(\))")
_POINTER = ".param .u64 .ptr .global .align 1"


def reorder(ptx: str, names: Sequence[str], order: Sequence[str | None]) -> str:
    """Return PTX whose one entry takes its parameters in another order.

    names : what the kernel takes, Kernel.signature's keys; behind them the compiler's own parameters, which go
    order : what the caller passes: a name, once each, or None for a pointer that the kernel does not take
    raises : ValueError where the PTX has no such entry, a name is missing, or the code reads a parameter that goes
    """
    entries = list(_ENTRY.finditer(ptx))
    if len(entries) != 1:
        raise ValueError(f"the PTX has {len(entries)} entries, one is expected")
    entry = entries[0]
    symbol, declared = entry[2], [part.strip() for part in entry[3].split(",") if part.strip()]
    passed = [name for name in order if name is not None]
    if sorted(passed) != sorted(names):
        raise ValueError(
            f"{symbol} takes {', '.join(names)}, the caller passes {', '.join(passed)}; they must be the same, once "
            "each"
        )
    if len(declared) < len(names):
        raise ValueError(f"{symbol} declares {len(declared)} parameters, {len(names)} or more are expected")
    for n in range(len(names), len(declared)):
        if re.search(rf"\b{symbol}_param_{n}\b", ptx[entry.end() :]):
            raise ValueError(f"{symbol} reads its parameter {n}, which is none of {', '.join(names)}")
    of_name = dict(zip(names, declared, strict=False))
    made = [
        f"{_POINTER} {symbol}_unused_{n}" if name is None else of_name[name] for n, name in enumerate(order)
    ]
    listed = "\n\t" + ",\n\t".join(made) + "\n"
    return ptx[: entry.start(3)] + listed + ptx[entry.end(3) :]


def named_by_content(ptx: str, symbol: str) -> tuple[str, str]:
    """Return (PTX whose entry has a name that no other PTX's has, that name).

    Kernels of one function differ by what is compiled in, and a plan holds many: who looks one up by its name alone
    gets the right one.
    """
    name = f"{symbol}_{hashlib.sha256(ptx.encode()).hexdigest()[:16]}"
    return re.sub(rf"\b{symbol}(?=\(|_param_|_unused_)", name, ptx), name


def at_most_version(ptx: str, version: tuple[int, int]) -> str:
    """Return PTX that says it is of this version of the language, or of an older one that it says already.

    The compiler writes its own newest version, which a driver may be too old for, whatever the code uses. An assembler
    says so where the code does need more.
    """
    found = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    if found is None:
        raise ValueError("the PTX does not say its version")
    if (int(found[1]), int(found[2])) <= version:
        return ptx
    return f"{ptx[: found.start()]}.version {version[0]}.{version[1]}{ptx[found.end() :]}"
