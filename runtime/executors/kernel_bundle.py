"""kernels.json and the cubins beside a plan: device kernels compiled when the engine was built. Standard library only.

bundle = load(manifest.kernels_dir("sm89"), sm=89)
draw = bundle.kernel("sampling_draw")
module = load_module(draw.cubin); function = module[draw.symbol]
# grid programs of 32 * draw.num_warps threads, draw.shared_bytes; arguments, then EXTRA_POINTERS null pointers
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from .. import manifest_fields as read
from ..errors import EngineFileError, UnsupportedError
from ..file_kind import no_file
from ..manifest_fields import Fields

BUNDLE_NAME = "kernels.json"
SCHEMA_VERSION = 1
MAX_BUNDLE_BYTES = 1 << 20
MAX_CUBIN_BYTES = 16 << 20
EXTRA_POINTERS = 2
"""Pointers that a compiled kernel takes behind its arguments: to scratch memory that ours do not need, so nulls."""

_TYPE = re.compile(r"(\*?)(i1|[iu](?:8|16|32|64)|fp(?:16|32|64)|bf16)(?::(16))?")
_FIRST_ALONE_MAJOR = 9  # from sm90 on a cubin uses what its own capability alone has

Constant = int | float | bool | str | None


def _refuse(where: str, value: Any, wanted: str) -> EngineFileError:
    return EngineFileError(f"{where} is {repr(value)[:60]}, it must be {wanted}; {read.REBUILD}")


def _matching(pattern: str, wanted: str) -> Any:
    def reader(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > 200 or not re.fullmatch(pattern, value):
            raise _refuse(where, value, wanted)
        return value

    return dataclasses.field(metadata={"read": reader})


def _identifier() -> Any:
    return _matching(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and '_'")


def _constants() -> Any:
    return dataclasses.field(metadata={"read": _read_constants})


def _read_constants(value: Any, where: str) -> dict[str, Constant]:
    if not isinstance(value, dict):
        raise _refuse(where, value, "an object")
    for name, one in value.items():
        if one is not None and not isinstance(one, int | float | str):
            raise _refuse(f"{where}.{name[:60]}", one, "a number, a text, true, false or null")
    return dict(value)


@dataclasses.dataclass(frozen=True)
class ArgumentEntry(Fields):
    """An argument of a launch: its name, and its type in the Triton language's words.

    type : "*i32" is a pointer to 32-bit integers, "fp32" a number; ":16" behind it promises a multiple of 16
    """

    name: str = _identifier()
    type: str = _matching(_TYPE.pattern, "a type such as i32, fp32, *fp16 or *i32:16")

    @property
    def is_pointer(self) -> bool:
        """Whether it is an address of device memory."""
        return self.type.startswith("*")

    @property
    def multiple_of(self) -> int:
        """What the address or the number must be a multiple of: 16 or 1."""
        return 16 if self.type.endswith(":16") else 1


@dataclasses.dataclass(frozen=True)
class CubinEntry(Fields):
    """A kernel compiled for one compute capability.

    sm : 89 for 8.9
    shared_bytes : shared memory to ask for in a launch
    """

    sm: int = read.integer(50, 999)
    file: str = _matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "the plain name of a file beside kernels.json")
    size: int = read.integer(1, MAX_CUBIN_BYTES)
    sha256: str = read.sha256()
    shared_bytes: int = read.integer(0, 1 << 20)


@dataclasses.dataclass(frozen=True)
class KernelEntry(Fields):
    """A kernel: what it is called by whom, how it is launched, and its cubins.

    symbol : the function in every cubin
    arguments : of a launch, in order
    constants : what was compiled in
    """

    name: str = _identifier()
    symbol: str = _identifier()
    arguments: tuple[ArgumentEntry, ...] = read.entries(ArgumentEntry)
    num_warps: int = read.integer(1, 32)
    constants: dict[str, Constant] = _constants()  # noqa: RUF009 - it makes the field
    cubins: tuple[CubinEntry, ...] = read.entries(CubinEntry)


@dataclasses.dataclass(frozen=True)
class BundleEntry(Fields):
    """The whole of kernels.json.

    key : hash of everything that went into the cubins; equal keys = the same kernels
    """

    schema_version: int = read.integer(SCHEMA_VERSION, SCHEMA_VERSION)
    triton_version: str = read.text()
    key: str = read.sha256()
    kernels: tuple[KernelEntry, ...] = read.entries(KernelEntry)

    def sms(self) -> tuple[int, ...]:
        """Return the compute capabilities that there are cubins for, in order."""
        return tuple(sorted({cubin.sm for kernel in self.kernels for cubin in kernel.cubins}))


@dataclasses.dataclass(frozen=True)
class LoadedKernel:
    """A kernel to load on one GPU; fields as in KernelEntry and CubinEntry."""

    name: str
    symbol: str
    arguments: tuple[ArgumentEntry, ...]
    num_warps: int
    shared_bytes: int
    constants: dict[str, Constant]
    sm: int
    cubin: bytes


@dataclasses.dataclass(frozen=True)
class KernelBundle:
    """The kernels of a folder as one GPU runs them."""

    directory: pathlib.Path
    entry: BundleEntry
    kernels: dict[str, LoadedKernel]

    def kernel(self, name: str) -> LoadedKernel:
        """Return a kernel; EngineFileError for one that this engine was built without."""
        if name in self.kernels:
            return self.kernels[name]
        raise EngineFileError(
            f"{self.directory} has no kernel {name!r}, only {', '.join(sorted(self.kernels)) or 'none'}: another "
            "version of plansmith built it; build the engine again with this one"
        )


def load(directory: str | os.PathLike[str], sm: int) -> KernelBundle:
    """Return the kernels of a folder for a GPU, their files read and compared with kernels.json.

    sm : the GPU's compute capability, 89 for 8.9
    raises : EngineFileError for a file that is missing, damaged or of another version; UnsupportedError for a GPU that
        no cubin runs on
    """
    root = pathlib.Path(directory)
    entry = read_bundle(root)
    chosen = {kernel.name: _choose(kernel, sm, root) for kernel in entry.kernels}
    kernels = {
        kernel.name: LoadedKernel(
            name=kernel.name,
            symbol=kernel.symbol,
            arguments=kernel.arguments,
            num_warps=kernel.num_warps,
            shared_bytes=chosen[kernel.name].shared_bytes,
            constants=kernel.constants,
            sm=chosen[kernel.name].sm,
            cubin=_read_cubin(root / chosen[kernel.name].file, chosen[kernel.name]),
        )
        for kernel in entry.kernels
    }
    return KernelBundle(root, entry, kernels)


def runs_on(cubin_sm: int, gpu_sm: int) -> bool:
    """Return whether a cubin runs on a GPU: on its own capability, before sm90 on later minor ones of its major too."""
    major, minor = divmod(gpu_sm, 10)
    compiled_major, compiled_minor = divmod(cubin_sm, 10)
    if compiled_major != major or major >= _FIRST_ALONE_MAJOR:
        return cubin_sm == gpu_sm
    return compiled_minor <= minor


def _choose(kernel: KernelEntry, sm: int, root: pathlib.Path) -> CubinEntry:
    """Return the latest cubin that runs on a GPU."""
    fitting = [cubin for cubin in kernel.cubins if runs_on(cubin.sm, sm)]
    if not fitting:
        raise UnsupportedError(
            f"the kernel {kernel.name} of {root} is compiled for {_names(c.sm for c in kernel.cubins)}, this GPU is "
            f"sm{sm}; build a target for it and open that"
        )
    return max(fitting, key=lambda cubin: cubin.sm)


def _names(sms: Iterable[int]) -> str:
    return ", ".join(f"sm{sm}" for sm in sorted(sms))


def read_bundle(directory: str | os.PathLike[str]) -> BundleEntry:
    """Return the checked kernels.json of a folder; no cubin is read. Raises EngineFileError."""
    path = pathlib.Path(directory) / BUNDLE_NAME
    data = _read_file(path, MAX_BUNDLE_BYTES)
    content = read.parse_json(data, str(path))
    version = content.get("schema_version")
    if isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION:
        raise EngineFileError(
            f"{path} has schema version {version}, this plansmith reads {SCHEMA_VERSION}; upgrade plansmith: "
            "pip install --upgrade plansmith"
        )
    entry = BundleEntry.read(content, str(path))
    _check(entry, path)
    return entry


def _check(entry: BundleEntry, path: pathlib.Path) -> None:
    """Check what no single field shows."""
    cubins = [cubin for kernel in entry.kernels for cubin in kernel.cubins]
    rules = [
        (_unique(kernel.name for kernel in entry.kernels), "two kernels have one name"),
        (_unique(cubin.file for cubin in cubins), "two cubins are one file"),
        (all(kernel.cubins for kernel in entry.kernels), "every kernel must have a cubin"),
        (
            all(_unique(cubin.sm for cubin in kernel.cubins) for kernel in entry.kernels),
            "a kernel has two cubins for one compute capability",
        ),
        (
            all(_unique(argument.name for argument in kernel.arguments) for kernel in entry.kernels),
            "a kernel has two arguments of one name",
        ),
        (
            all(kernel.num_warps & (kernel.num_warps - 1) == 0 for kernel in entry.kernels),
            "num_warps must be a power of two",
        ),
    ]
    for holds, text in rules:
        if not holds:
            raise EngineFileError(f"{path} contradicts itself: {text}; {read.REBUILD}")


def _unique(values: Iterable[Any]) -> bool:
    listed = list(values)
    return len(set(listed)) == len(listed)


def _read_file(path: pathlib.Path, max_bytes: int) -> bytes:
    try:
        if (wrong := no_file(path)) is not None:  # a pipe would never end
            raise EngineFileError(f"{path} {wrong}; copy the engine again, or {read.REBUILD}")
        if path.stat().st_size > max_bytes:
            raise EngineFileError(
                f"{path} has {path.stat().st_size} bytes, more than the {max_bytes} that it can have; {read.REBUILD}"
            )
        return path.read_bytes()
    except OSError as error:
        raise EngineFileError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def _read_cubin(path: pathlib.Path, entry: CubinEntry) -> bytes:
    data = _read_file(path, MAX_CUBIN_BYTES)
    if len(data) != entry.size:
        raise EngineFileError(
            f"{path} has {len(data)} bytes, {BUNDLE_NAME} says {entry.size}: it was cut short or replaced; copy the "
            f"engine again, or {read.REBUILD}"
        )
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise EngineFileError(
            f"{path} is not what {BUNDLE_NAME} says (its sha256 differs): its contents changed after the build; copy "
            f"the engine again, or {read.REBUILD}"
        )
    return data
