"""The GPUs of this machine, asked of the driver without any package."""

from __future__ import annotations

import ctypes

_LIBRARY = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class DriverError(Exception):
    """There is no driver, or it says no; the text goes into a sentence."""


def device_capabilities() -> list[str]:
    """Return the compute capability of each visible GPU in its order, e.g. ["sm90", "sm90"].

    raises DriverError where the driver is missing or cannot start
    """
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        raise DriverError("there is no NVIDIA driver") from None
    count = ctypes.c_int()
    for name, code in (
        ("cuInit", driver.cuInit(0)),
        ("cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count))),
    ):
        if code != 0:
            raise DriverError(f"the NVIDIA driver finds no GPU ({name} gives {code})")
    return [_capability(driver, ordinal) for ordinal in range(count.value)]


def _capability(driver: ctypes.CDLL, ordinal: int) -> str:
    parts = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        code = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal)
        if code != 0:
            raise DriverError(f"the NVIDIA driver does not say what GPU {ordinal} is (error {code})")
        parts.append(str(value.value))
    return "sm" + "".join(parts)
