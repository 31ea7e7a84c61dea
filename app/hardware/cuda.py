"""The GPUs as CUDA numbers them, asked of the driver's own library without torch."""

from __future__ import annotations

import ctypes
from typing import Any

#: cuDeviceGetAttribute numbers of the compute capability.
_MAJOR, _MINOR = 75, 76


def probe_cuda(library: str = "libcuda.so.1") -> dict[str, Any]:
    """Start CUDA through the driver's own library.

    Keys: error (text or ""), code (of cuInit), version ("13.0"), devices (bus_id and capability of each).
    """
    found: dict[str, Any] = {"error": "", "code": None, "version": None, "devices": []}
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return {**found, "error": str(error)}
    code = cuda.cuInit(0)
    found["code"] = code
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        return {**found, "error": f"Error {code}: {text.value.decode() if text.value else 'unknown'}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found["version"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for ordinal in range(count.value):
        device, bus = ctypes.c_int(), ctypes.create_string_buffer(32)
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetPCIBusId(bus, 32, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        found["devices"].append({"bus_id": bus.value.decode().lower()[-12:], "capability": [major.value, minor.value]})
    return found


def bus_id(index: int) -> str:
    """PCI bus id of a CUDA device ("0000:3d:00.0"), which is how NVML knows it; "" when unknown."""
    devices = probe_cuda()["devices"]
    return str(devices[index]["bus_id"]) if index < len(devices) else ""
