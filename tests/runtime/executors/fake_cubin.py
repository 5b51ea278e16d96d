"""The parameters of a cubin's kernels: name -> (offset, bytes) each, read from the file as the driver reads them."""

from __future__ import annotations

import struct

_KPARAM_INFO = 0x17
_SIZED = 4  # the format of an attribute that a value of a given size follows; others have theirs in place


def is_cubin(image: bytes) -> bool:
    """Return whether the image is an ELF file of a GPU."""
    return image[:4] == b"\x7fELF"


def image_size(header: bytes) -> int:
    """Return the size of a cubin from its first 64 bytes: its section table ends it, or the program headers do."""
    (programs, sections) = struct.unpack_from("<QQ", header, 32)
    program_size, programs_count, section_size, sections_count = struct.unpack_from("<HHHH", header, 54)
    return int(max(programs + program_size * programs_count, sections + section_size * sections_count))


def kernel_parameters(image: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return the (offset, size) of each parameter of each kernel, in order; ValueError for what is no cubin."""
    if not is_cubin(image) or len(image) < 64:
        raise ValueError("no cubin")
    found = {}
    for name, start, size in _sections(image):
        if name.startswith(".nv.info."):
            found[name.removeprefix(".nv.info.")] = _parameters(image[start : start + size])
    return found


def _sections(image: bytes) -> list[tuple[str, int, int]]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_idx = struct.unpack_from("<HHH", image, 58)
    rows = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    names = rows[names_idx][4]
    out = []
    for row in rows:
        start = names + row[0]
        out.append((image[start : image.index(b"\0", start)].decode(), row[4], row[5]))
    return out


def _parameters(info: bytes) -> list[tuple[int, int]]:
    at, found = 0, {}
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", info, at)
            found[ordinal] = (offset, flags >> 18)
        at += size
    return [found[ordinal] for ordinal in sorted(found)]
