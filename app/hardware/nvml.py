"""The GPUs of this machine through NVML, the driver's own library."""

from __future__ import annotations

import json
from collections.abc import Callable
from ctypes import byref
from typing import Any

from app.hardware.gpus import Gpu, Machine, numa_node
from app.hardware.smi import read_smi
from app.hardware.topology import NVML_LEVELS, NVML_P2P


def read() -> Machine:
    """Ask NVML; where the library or the package is missing, read nvidia-smi. Never raises; see ``problem``."""
    machine = read_nvml()
    if machine.source == "none":
        text = read_smi()
        if text.gpus:
            return text
    return machine


def read_nvml() -> Machine:
    """Read everything through NVML. ``source`` is "none" and ``problem`` says why when it cannot be used."""
    try:
        import pynvml as nvml
    except ImportError as error:
        return Machine("none", f"nvidia-ml-py is not installed ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Machine("none", f"NVML: {error}")
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [_read_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
        cells, p2p = _read_matrix(nvml, handles)
        return Machine("nvml", "", driver, f"{number // 1000}.{number % 1000 // 10}", gpus, cells, p2p)
    except nvml.NVMLError as error:
        return Machine("none", f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    gpu = Gpu(index, nvml.nvmlDeviceGetName(handle))
    quiet = {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION}

    def ask(function: str, *args: Any) -> Any:
        """The answer, or None where this GPU or driver has none; any other error is kept as a fault of the GPU."""
        try:
            return getattr(nvml, function)(handle, *args)
        except AttributeError:
            return None  # a package older than the function
        except nvml.NVMLError as error:
            if error.value not in quiet:
                gpu.faults.append(f"{function}: {error}")
            return None

    pci = ask("nvmlDeviceGetPciInfo")
    if pci is not None:
        gpu.bus_id = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
        gpu.numa_node = numa_node(gpu.bus_id)
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    gpu.capability = (capability[0], capability[1]) if capability else None
    memory, bar1 = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetBAR1MemoryInfo")
    if memory is not None:
        gpu.memory_mib, gpu.memory_used_mib = memory.total >> 20, memory.used >> 20
    gpu.bar1_mib = bar1.bar1Total >> 20 if bar1 is not None else None
    gpu.pcie_gen = ask("nvmlDeviceGetCurrPcieLinkGeneration")
    gpu.pcie_gen_max = ask("nvmlDeviceGetMaxPcieLinkGeneration")
    gpu.pcie_gen_card = ask("nvmlDeviceGetGpuMaxPcieLinkGeneration")
    gpu.pcie_width = ask("nvmlDeviceGetCurrPcieLinkWidth")
    gpu.pcie_width_max = ask("nvmlDeviceGetMaxPcieLinkWidth")
    gpu.persistence = _flag(ask("nvmlDeviceGetPersistenceMode"))
    mig, ecc = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetEccMode")
    gpu.mig = bool(mig[0]) if mig else None
    gpu.ecc = bool(ecc[0]) if ecc else None
    if gpu.ecc:
        gpu.ecc_uncorrected = ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    rows = ask("nvmlDeviceGetRemappedRows")
    if rows is not None:
        gpu.rows_pending, gpu.rows_failed = bool(rows[2]), bool(rows[3])
    limit, default = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    gpu.power_limit_w = limit / 1000 if limit is not None else None
    gpu.power_default_w = default / 1000 if default is not None else None
    gpu.temperature_c = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
    gpu.temperature_slowdown_c = ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    gpu.clock_sm_mhz = ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
    gpu.clock_sm_max_mhz = ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    gpu.throttle = throttle_bits(nvml, handle)
    _read_links(nvml, gpu, ask)
    return gpu


def throttle_bits(nvml: Any, handle: Any) -> int | None:
    """Current clock event reasons; the function has two names, and an old driver knows only the older one."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        try:
            return int(getattr(nvml, name)(handle))
        except (AttributeError, nvml.NVMLError):
            continue
    return None


def _read_links(nvml: Any, gpu: Gpu, ask: Callable[..., Any]) -> None:
    """NVLinks that are up, whether they end at a switch, and the state of the fabric."""
    known = len(gpu.faults)
    up = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = ask("nvmlDeviceGetNvLinkState", link)
        if state is None:  # past the last link the driver answers "not supported" or "invalid argument"
            break
        if state:
            up.append(link)
    del gpu.faults[known:]
    gpu.nvlinks = len(up)
    if up:
        kinds = [ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) for link in up]
        gpu.nvswitch = nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in kinds
    info_type = getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", None)
    if info_type is not None:
        info = info_type()
        info.version = nvml.nvmlGpuFabricInfo_v2
        before = len(gpu.faults)
        if ask("nvmlDeviceGetGpuFabricInfoV", byref(info)) is not None:
            gpu.fabric_state = int(info.state)
        del gpu.faults[before:]  # an older driver does not know this version of the structure; that is no fault


def _read_matrix(nvml: Any, handles: list[Any]) -> tuple[list[list[str]], list[list[str]]]:
    """The topology cells and the driver's P2P grants between all GPUs."""
    n = len(handles)
    cells = [["X" if i == j else "" for j in range(n)] for i in range(n)]
    p2p = [["X" if i == j else "U" for j in range(n)] for i in range(n)]
    peers = [_peer_links(nvml, handle) for handle in handles] if n > 1 else []
    buses = [_bus(nvml, handle) for handle in handles] if n > 1 else []
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            try:
                cells[i][j] = NVML_LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[i], handles[j]), "")
            except nvml.NVMLError:
                cells[i][j] = ""
            direct = peers[i].get(buses[j], 0)
            switched = min(peers[i].get("switch", 0), peers[j].get("switch", 0))
            if direct or switched:
                cells[i][j] = f"NV{direct or switched}"
            try:  # the index for reads is 0; the package's own constant for it is a tuple
                p2p[i][j] = NVML_P2P.get(nvml.nvmlDeviceGetP2PStatus(handles[i], handles[j], 0), "U")
            except nvml.NVMLError:
                p2p[i][j] = "U"
    return cells, p2p


def _bus(nvml: Any, handle: Any) -> str:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()[-12:]


def _peer_links(nvml: Any, handle: Any) -> dict[str, int]:
    """Number of live NVLinks of one GPU by the bus id of the other end, or "switch"."""
    ends: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nvml.NVMLError:
            break
        try:
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
        except nvml.NVMLError:
            kind = nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN
        try:
            remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
            end = (remote.decode() if isinstance(remote, bytes) else str(remote)).lower()[-12:]
        except nvml.NVMLError:
            end = ""
        # In a virtual machine the switch is often invisible: a live link whose end cannot be named is one to a switch.
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH or not end or set(end) <= set("0:.f"):
            end = "switch"
        ends[end] = ends.get(end, 0) + 1
    return ends


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def main() -> None:
    """Print this machine's reading as JSON: a program of its own, so that a driver which hangs can be given up on."""
    print(json.dumps(read().as_data()))


if __name__ == "__main__":
    main()
