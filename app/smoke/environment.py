"""The environment: versions against the lock, one copy of each NVIDIA library, the NCCL that is really loaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from app.hardware.report import Report, failed, passed, skipped, timed, warning
from app.host.variants import Variant, choose
from app.smoke.proof import Wrong, check_torch, check_versions
from app.smoke.stage import begin, finish, mark

_LIBRARIES = ("libcuda.so", "libcudart", "libcublas.so", "libcublasLt", "libcudnn.so", "libnccl.so", "libcudnn_ops")


def main() -> None:
    """Report on the environment this process runs in."""
    begin()
    mark("import torch")
    import torch

    variant = choose(None) if os.environ.get("KIT_VARIANT") else None
    mark("versions")
    reports = timed(lambda: [check_lock(variant)])
    mark("libraries")
    reports += timed(
        lambda: [check_duplicates(_nvidia_packages()), check_library_path(os.environ.get("LD_LIBRARY_PATH"))]
    )
    mark("torch")
    reports += timed(lambda: [check_arithmetic(), check_nccl()])
    finish(
        reports,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        architectures=_architectures(),
        loaded=loaded_libraries(),
    )


def check_lock(variant: Variant | None) -> Report:
    """Every package in its locked version, and torch's CUDA, cuDNN, NCCL and architectures as variant.toml says."""
    import torch

    name = "environment"
    built = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    if variant is None:
        return skipped(name, f"KIT_VARIANT is not set, so there is no lock to compare with ({built})")
    checks: list[Callable[[Variant], str]] = [check_versions, check_torch]
    good, wrong = [], []
    for check in checks:
        try:
            good.append(check(variant))
        except Wrong as error:
            wrong.append(str(error))
        except Exception as error:  # a broken package may raise anything; it is named and the check fails
            wrong.append(f"{type(error).__name__}: {error}")
    if wrong:
        return failed(
            name,
            f"variant {variant.cuda}: " + "; ".join(wrong),
            "this is not the environment that was proven: something was installed, removed or swapped after the build",
            f"./inv build --cuda {variant.cuda} --no-cache",
        )
    return passed(name, f"variant {variant.cuda}: " + "; ".join(good))


def _nvidia_packages() -> dict[str, str]:
    """Version by name of every installed nvidia-* distribution."""
    return {
        str(one.metadata["Name"]).lower(): one.version
        for one in importlib.metadata.distributions()
        if str(one.metadata["Name"]).lower().startswith("nvidia-")
    }


def check_duplicates(packages: dict[str, str]) -> Report:
    """Two wheels of one NVIDIA library (cu12 and cu13) write into the same folder: whichever came last wins."""
    name = "NVIDIA libraries"
    families: dict[str, list[str]] = {}
    for package in packages:
        if package != "nvidia-ml-py":
            families.setdefault(re.sub(r"-cu\d+$", "", package), []).append(package)
    double = {family: names for family, names in families.items() if len(names) > 1}
    if double:
        text = "; ".join(f"{' and '.join(f'{one} {packages[one]}' for one in names)}" for names in double.values())
        return failed(
            name,
            f"two copies of one library: {text}",
            "both wheels write the same folder, so torch may load the one it was not built for (undefined symbol)",
            "rebuild the environment from the lock: ./inv build --cuda V --no-cache",
            packages=packages,
        )
    return passed(name, f"{len(packages)} NVIDIA packages, one of each", packages=packages)


def check_library_path(value: str | None) -> Report:
    """CUDA libraries on LD_LIBRARY_PATH come before torch's own."""
    name = "library path"
    found: list[str] = []
    for folder in filter(None, (value or "").split(":")):
        path = Path(folder)
        if "compat" in path.parts:
            found.append(f"{folder} (cuda-compat)")
            continue
        hits = sorted(
            p.name for stem in ("libcudart", "libcublas", "libcudnn", "libnccl") for p in path.glob(f"{stem}*.so*")
        )
        if hits:
            found.append(f"{folder} ({hits[0]})")
    if found:
        return warning(
            name,
            "LD_LIBRARY_PATH brings other CUDA libraries: " + ", ".join(found),
            "they are loaded before torch's own: undefined symbols, errors 803 and 804, another NCCL",
            "unset LD_LIBRARY_PATH",
        )
    return passed(name, "no CUDA libraries on LD_LIBRARY_PATH")


def check_arithmetic() -> Report:
    """torch computes, and hands arrays to NumPy and back (a NumPy of the wrong major version cannot)."""
    import torch

    name = "torch"
    try:
        array = torch.arange(6, dtype=torch.float64).reshape(2, 3).numpy()
        back = torch.from_numpy(array @ array.T)
    except RuntimeError as error:
        return failed(
            name,
            f"torch and NumPy do not work together: {error}",
            "this torch was built for another major version of NumPy",
            "rebuild the environment from the lock: ./inv build --cuda V --no-cache",
        )
    if back.tolist() != [[5.0, 14.0], [14.0, 50.0]]:
        return failed(
            name, f"a 2x2 product came out as {back.tolist()}", "broken torch or NumPy", "./inv build --no-cache"
        )
    return passed(name, f"torch {torch.__version__} computes and shares memory with NumPy")


def _architectures() -> list[str]:
    import torch

    return (torch._C._cuda_getArchFlags() or "").split() if torch.version.cuda else []


def loaded_libraries(maps: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Paths of the CUDA libraries mapped into this process, by library."""
    lines = Path("/proc/self/maps").read_text().splitlines() if maps is None else maps
    paths = {line.split(maxsplit=5)[5].strip() for line in lines if line.count("/")}
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        for library in _LIBRARIES:
            if Path(path).name.startswith(library):
                found.setdefault(library, []).append(path)
    return found


def check_nccl() -> Report:
    """The NCCL that torch really loaded, against the wheel that is installed."""
    import torch

    name = "NCCL library"
    if not torch.version.cuda:
        return skipped(name, "this torch was built without CUDA")
    loaded = ".".join(str(part) for part in torch.cuda.nccl.version())
    wheels = {one: version for one, version in _nvidia_packages().items() if one.startswith("nvidia-nccl")}
    paths = loaded_libraries().get("libnccl.so", [])
    where = paths[0] if paths else "linked into torch"
    if len(paths) > 1:
        return failed(
            name,
            f"two NCCL libraries are loaded: {', '.join(paths)}",
            "LD_PRELOAD or LD_LIBRARY_PATH brings a second one",
            "unset LD_PRELOAD and LD_LIBRARY_PATH",
        )
    if paths and wheels and not any(version.startswith(loaded) for version in wheels.values()):
        return warning(
            name,
            f"NCCL {loaded} is loaded from {where}, but the installed wheel is {wheels}",
            "another NCCL than the locked one is used",
            "unset LD_PRELOAD and LD_LIBRARY_PATH, unless this is meant",
        )
    return passed(name, f"NCCL {loaded} from {where}", version=loaded, path=where)


if __name__ == "__main__":
    main()
