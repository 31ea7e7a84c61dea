"""A GPU watched while it works, through NVML: clocks, heat, power, throttle reasons, its PCIe link."""

from __future__ import annotations

import threading
from typing import Any

from app.hardware.nvml import throttle_bits


class Watcher:
    """Samples clocks, temperature, power, throttle reasons and the PCIe link of one GPU while it works."""

    def __init__(self, bus: str, every: float = 0.1) -> None:
        """``bus`` is the PCI bus id; a sample is taken ``every`` so many seconds."""
        self.every = every
        self.samples: list[dict[str, Any]] = []
        self.problem = ""
        self._handle: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
        except Exception as error:  # NVML may be missing or refuse; then there are no samples, and the reports say so
            self.problem = f"{type(error).__name__}: {error}"

    def sample(self) -> dict[str, Any]:
        """One reading; a value that the driver does not offer is None."""
        import pynvml

        def ask(function: str, *rest: Any) -> Any:
            try:
                return getattr(pynvml, function)(self._handle, *rest)
            except (pynvml.NVMLError, AttributeError):
                return None

        power = ask("nvmlDeviceGetPowerUsage")
        return {
            "clock_mhz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            "clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM),
            "temperature_c": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            "power_w": power / 1000 if power is not None else None,
            "throttle": throttle_bits(pynvml, self._handle),
            "pcie_gen": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        }

    def start(self) -> None:
        """Begin to sample in a thread of its own."""
        self.samples = []
        self._stop.clear()
        if self._handle is None:
            return

        def watch() -> None:
            while not self._stop.wait(self.every):
                self.samples.append(self.sample())

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def highest(self, key: str) -> Any:
        """The largest sample of a value, or None when there is none."""
        values = [sample[key] for sample in self.samples if sample[key] is not None]
        return max(values) if values else None

    def median(self, key: str) -> Any:
        """The middle sample of a value, or None when there is none."""
        values = sorted(sample[key] for sample in self.samples if sample[key] is not None)
        return values[len(values) // 2] if values else None
