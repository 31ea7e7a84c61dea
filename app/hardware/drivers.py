"""Which NVIDIA driver can run which CUDA, and which GPU a list of kernels serves: tables, and the rules that read them.

Sources: CUDA toolkit release notes (driver shipped with each toolkit, Linux x86_64) and NVIDIA's minor version
compatibility page (the floor of each CUDA family).
"""

from __future__ import annotations

from dataclasses import dataclass

#: (CUDA release, Linux driver shipped with it), oldest first. 12.7 was never released.
TOOLKIT_DRIVERS: tuple[tuple[str, str], ...] = (
    ("11.0.2", "450.51.05"),
    ("11.0.3", "450.51.06"),
    ("11.1.0", "455.23"),
    ("11.1.1", "455.32"),
    ("11.2.0", "460.27.03"),
    ("11.2.1", "460.32.03"),
    ("11.3.0", "465.19.01"),
    ("11.4.0", "470.42.01"),
    ("11.4.1", "470.57.02"),
    ("11.4.3", "470.82.01"),
    ("11.5.0", "495.29.05"),
    ("11.6.0", "510.39.01"),
    ("11.6.1", "510.47.03"),
    ("11.7.0", "515.43.04"),
    ("11.7.1", "515.48.07"),
    ("11.8.0", "520.61.05"),
    ("12.0.0", "525.60.13"),
    ("12.0.1", "525.85.12"),
    ("12.1.0", "530.30.02"),
    ("12.2.0", "535.54.03"),
    ("12.2.1", "535.86.09"),
    ("12.2.2", "535.104.05"),
    ("12.3.0", "545.23.06"),
    ("12.3.1", "545.23.08"),
    ("12.4.0", "550.54.14"),
    ("12.4.1", "550.54.15"),
    ("12.5.0", "555.42.02"),
    ("12.5.1", "555.42.06"),
    ("12.6.0", "560.28.03"),
    ("12.6.1", "560.35.03"),
    ("12.6.3", "560.35.05"),
    ("12.8.0", "570.26"),
    ("12.8.1", "570.124.06"),
    ("12.9.0", "575.51.03"),
    ("12.9.1", "575.57.08"),
    ("13.0.0", "580.65.06"),
    ("13.0.1", "580.82.07"),
    ("13.0.2", "580.95.05"),
    ("13.1.0", "590.44.01"),
    ("13.1.1", "590.48.01"),
    ("13.2.0", "595.45.04"),
    ("13.2.1", "595.58.03"),
    ("13.2.2", "595.71.05"),
)

#: Oldest driver that runs any release of a CUDA family (minor version compatibility).
FAMILY_FLOORS: dict[str, str] = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}

#: CUDA releases whose wheels were built with an update other than the first: what is native there.
_BUILT_WITH = {"11.7": "11.7.1"}

NATIVE = "native"
MINOR_VERSION = "minor-version"
TOO_OLD = "too-old"
UNKNOWN = "unknown"


def numbers(version: str) -> tuple[int, ...]:
    """``"535.104.05"`` as ``(535, 104, 5)``. Raises ValueError naming the text when a part is no number."""
    try:
        return tuple(int(part) for part in version.strip().split("."))
    except ValueError as error:
        raise ValueError(f"not a dotted version number: {version!r}") from error


def floor_driver(cuda: str) -> str | None:
    """Oldest Linux driver that runs programs built with CUDA ``cuda`` ("12.1"), or None for an unknown family."""
    return FAMILY_FLOORS.get(cuda.split(".", maxsplit=1)[0])


def native_driver(cuda: str) -> str | None:
    """The driver shipped with CUDA ``cuda`` ("12.1" or "12.1.0"), or None when the table has no such release."""
    wanted = _BUILT_WITH.get(cuda, cuda)
    for release, driver in TOOLKIT_DRIVERS:
        if release == wanted or release.rsplit(".", 1)[0] == wanted:
            return driver
    return None


def newest_cuda(driver: str) -> str | None:
    """Newest CUDA release of the table that ``driver`` runs natively, or None when it is older than all."""
    have = numbers(driver)
    fitting = [release for release, needed in TOOLKIT_DRIVERS if numbers(needed) <= have]
    return fitting[-1] if fitting else None


@dataclass(frozen=True)
class DriverVerdict:
    """What driver ``have`` means for CUDA ``cuda``: ``kind`` is native, minor-version, too-old or unknown."""

    kind: str
    cuda: str
    have: str
    floor: str | None
    native: str | None

    @property
    def runs(self) -> bool:
        """True when prebuilt kernels run."""
        return self.kind in (NATIVE, MINOR_VERSION)

    def sentence(self) -> str:
        """The verdict with its rule, for a report."""
        rule = f"CUDA {self.cuda} needs driver {self.floor} or newer, {self.native} is its own"
        if self.kind == NATIVE:
            return f"driver {self.have}: {rule}"
        if self.kind == MINOR_VERSION:
            return (
                f"driver {self.have} runs CUDA {self.cuda} through minor version compatibility ({rule}); what compiles "
                "PTX at run time (torch.compile, Triton, NVRTC) may fail with CUDA error 222 or 36"
            )
        if self.kind == TOO_OLD:
            return f"driver {self.have} is too old: {rule}"
        return f"driver {self.have}: no row for CUDA {self.cuda} in the driver table"


def judge_driver(driver: str, cuda: str) -> DriverVerdict:
    """Compare a driver version with what CUDA ``cuda`` needs. Raises ValueError on a version that is no number."""
    floor, native = floor_driver(cuda), native_driver(cuda)
    have = numbers(driver)
    if floor is None:
        kind = UNKNOWN
    elif have < numbers(floor):
        kind = TOO_OLD
    elif native is None or have >= numbers(native):
        kind = NATIVE
    else:
        kind = MINOR_VERSION
    return DriverVerdict(kind, cuda, driver, floor, native)


def serves(kernels: list[str], capability: tuple[int, int]) -> bool:
    """Whether machine code for ``kernels`` (["sm_75", "sm_80"]) runs on a GPU of compute capability (major, minor).

    Machine code runs on the same major version and a minor version not below its own. The wheels hold no PTX that a
    driver could compile for another architecture, so nothing else helps.
    """
    for kernel in kernels:
        digits = kernel.removeprefix("sm_").rstrip("af")
        if kernel.startswith("sm_") and digits.isdigit():
            major, minor = int(digits[:-1]), int(digits[-1])
            if major == capability[0] and minor <= capability[1]:
                return True
    return False


def sm(capability: tuple[int, int]) -> str:
    """Compute capability (9, 0) as torch writes it: ``sm_90``."""
    return f"sm_{capability[0]}{capability[1]}"
