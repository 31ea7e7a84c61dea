"""Doctor on recordings: every driver and GPU that a variant refuses, every answer of Docker, and the rest of a host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import Fault
from app.hardware.gpus import Gpu, Machine
from app.host import doctor, doctor_docker, doctor_gpus, doctor_host, doctor_read
from app.host.doctor_read import Disk, Readings
from app.host.variants import variants

VARIANTS = variants()
RECORDINGS = Path(__file__).parents[1] / "hardware" / "recordings" / "doctor"


def readings(machine: Machine | None = None, **kinds: dict[str, Any]) -> Readings:
    """A recording made by hand: commands as (code, text), files and listings as they are."""
    commands = {name: {"code": code, "text": text} for name, (code, text) in kinds.pop("commands", {}).items()}
    if machine is not None:
        commands["python -m app.hardware.nvml"] = {"code": 0, "text": json.dumps(machine.as_data())}
    known = {"commands": commands, "files": {}, "listings": {}, "disks": {}, "facts": {}}
    return Readings({**known, **kinds})


def machine(*capabilities: tuple[int, int], driver: str = "580.95.05", cell: str = "PHB", **changed: Any) -> Machine:
    n = len(capabilities)
    gpus = [
        Gpu(k, f"card {k}", f"0000:{k:02x}:00.0", capability, 24576, **changed)
        for k, capability in enumerate(capabilities)
    ]
    cells = [["X" if i == j else cell for j in range(n)] for i in range(n)]
    return Machine("nvml", "", driver, "13.0", gpus, cells, [])


# ---- variants


@pytest.mark.parametrize(
    ("capabilities", "driver", "use"),
    [
        ([(9, 0)], "580.159.04", "13.0"),
        ([(9, 0)], "535.104.05", "12.1"),
        ([(8, 6)] * 4, "525.60.13", "12.1"),
        ([(8, 6)], "470.161.03", "11.7"),
        ([(7, 0)] * 8, "580.95.05", "12.1"),
        ([(3, 7)], "470.161.03", "11.7"),
        ([(12, 0)] * 2, "580.95.05", "13.0"),
        ([(12, 0)], "570.124.06", None),
        ([(9, 0)], "470.161.03", None),
        ([(3, 5)], "470.161.03", None),
        ([(7, 0), (12, 0)], "580.95.05", None),
    ],
)
def test_which_variant_to_use(capabilities: list[tuple[int, int]], driver: str, use: str | None) -> None:
    found = machine(*capabilities, driver=driver)
    assert doctor_gpus.choose_variant(found, VARIANTS) == use
    report = doctor_gpus.check_variants(found, VARIANTS, None)
    assert report.status == ("passed" if use else "failed")
    if use:
        assert f"use {use}" in report.summary


def test_what_to_do_when_no_variant_fits() -> None:
    def fix(*capabilities: tuple[int, int], driver: str) -> str:
        return doctor_gpus.check_variants(machine(*capabilities, driver=driver), VARIANTS, None).fix

    assert fix((12, 0), driver="570.124.06") == "upgrade the driver to 580.65.06 or newer, then ./inv build --cuda 13.0"
    assert fix((9, 0), driver="470.161.03") == "upgrade the driver to 525.60.13 or newer, then ./inv build --cuda 12.1"
    assert "leave out GPU 0 card 0 (sm_70)" in fix((7, 0), (12, 0), (12, 0), driver="580.95.05")
    assert "older or newer than every variant" in fix((3, 5), driver="470.161.03")


def test_an_asked_for_variant_is_judged() -> None:
    refused = doctor_gpus.check_variants(machine((9, 0)), VARIANTS, "11.7")
    assert (refused.status, refused.fix) == ("failed", "use ./inv build --cuda 13.0")
    assert "no kernels for GPU 0 card 0 (sm_90)" in refused.cause
    assert doctor_gpus.check_variants(machine((9, 0)), VARIANTS, "12.1").status == "passed"


def test_without_gpus_the_default_is_named() -> None:
    reports = doctor.examine(readings(Machine("none", "NVML Shared Library Not Found")), VARIANTS)
    assert doctor.verdict(reports) == "use ./inv build --cuda 12.1"
    assert {report.status for report in reports if report.name in ("driver", "variants", "topology")} == {"skipped"}


# ---- driver

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Sep 24 00:00:00 UTC 2024\nGCC version:  gcc\n"


def test_kernel_module_and_library_of_different_versions() -> None:
    found = Machine("none", "NVML: Driver/library version mismatch NVML library version: 460.73")
    files = {"/proc/driver/nvidia/version": NVRM.format("460.56")}
    report = doctor_gpus.check_driver(readings(files=files), found)
    assert report.status == "failed"
    assert "kernel module 460.56, libraries 460.73" in report.summary
    assert report.fix.startswith("reboot")


def test_open_kernel_module_line_is_read_too() -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)\n"
    assert doctor_gpus.module_version(text) == "580.159.04"
    assert doctor_gpus.module_version(None) is None


def test_a_card_without_a_driver() -> None:
    bus = {"lspci": (0, "21:00.0 VGA compatible controller: NVIDIA Corporation GA102 [GeForce RTX 3090] (rev a1)\n")}
    files = {"/proc/modules": "nouveau 2334720 1 - Live 0x0\n"}
    report = doctor_gpus.check_driver(readings(commands=bus, files=files), Machine("none", "NVML not found"))
    assert report.status == "failed"
    assert "nouveau" in report.cause
    report = doctor_gpus.check_driver(readings(commands=bus), Machine("none", "NVML not found"))
    assert "no NVIDIA kernel module" in report.cause


def test_a_module_that_answers_nobody() -> None:
    files = {"/proc/driver/nvidia/version": NVRM.format("550.54.14")}
    report = doctor_gpus.check_driver(readings(files=files), Machine("none", "NVML: Unknown Error"))
    assert report.status == "failed"


def test_a_driver_that_hangs() -> None:
    hung = readings(commands={"python -m app.hardware.nvml": (doctor_read.HUNG, "")})
    assert "does not answer" in hung.machine().problem


# ---- fabric manager, IOMMU, topology


def test_fabric_manager() -> None:
    switched = machine((9, 0), (9, 0), nvswitch=True, fabric_state=3)
    devices = {"/proc/driver/nvidia-nvswitch/devices/*": ["/proc/driver/nvidia-nvswitch/devices/0000:05:00.0"]}

    def status(active: str, version: str = "580.95.05") -> str:
        commands = {
            "systemctl is-active nvidia-fabricmanager": (0, active),
            "nv-fabricmanager --version": (0, f"Fabric Manager version is : {version}\n"),
        }
        return doctor_gpus.check_fabric(readings(commands=commands, listings=devices), switched).status

    assert status("active\n") == "passed"
    assert status("inactive\n") == "failed"
    assert status("active\n", "575.57.08") == "failed"
    assert doctor_gpus.check_fabric(readings(), switched).status == "passed"  # a virtual machine
    assert doctor_gpus.check_fabric(readings(), machine((8, 6), (8, 6))).status == "skipped"


def test_iommu_and_acs() -> None:
    two = machine((8, 6), (8, 6))
    units = {"/sys/class/iommu/*": ["/sys/class/iommu/ivhd0"]}
    assert doctor_gpus.check_iommu(readings(listings=units), two).status == "warning"
    through = {"/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=pt\n"}
    assert doctor_gpus.check_iommu(readings(listings=units, files=through), two).status == "passed"
    control = {"lspci -vvv": (0, "40:01.1 PCI bridge: x\n\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+\n")}
    acs = doctor_gpus.check_iommu(readings(commands=control, files=through), two)
    assert (acs.status, acs.data["acs"]) == ("warning", 1)
    assert doctor_gpus.check_iommu(readings(listings=units), machine((9, 0), (9, 0), cell="NV18")).status == "skipped"
    assert doctor_gpus.check_iommu(readings(listings=units), machine((8, 6))).status == "skipped"


def test_each_gpu() -> None:
    narrow = machine((8, 6), (8, 9), pcie_width=4, pcie_width_max=16)
    reports = doctor_gpus.check_each_gpu(narrow)
    assert [report.status for report in reports] == ["warning", "warning", "warning"]
    assert "x4 of x16 PCIe lanes" in reports[0].summary
    assert reports[-1].name == "mixed GPUs"


# ---- Docker

INFO = {
    "ServerVersion": "26.1.5",
    "CgroupDriver": "systemd",
    "DockerRootDir": "/var/lib/docker",
    "OperatingSystem": "Debian GNU/Linux 12",
    "SecurityOptions": ["name=seccomp"],
    "Runtimes": {"runc": {}},
    "CDISpecDirs": ["/etc/cdi"],
}


def engine(changed: dict[str, Any] | None = None, **kinds: Any) -> tuple[Readings, dict[str, Any], Any]:
    text = json.dumps({**INFO, **(changed or {})})
    commands = {"docker info --format {{json .}}": (0, text), **kinds.pop("commands", {})}
    found = readings(commands=commands, **kinds)
    report, info = doctor_docker.check_engine(found)
    return found, info, report


def test_a_good_engine() -> None:
    found, info, report = engine(
        {"Runtimes": {"runc": {}, "nvidia": {}}}, listings={"/dev/char/195:*": ["/dev/char/195:0"]}
    )
    assert report.status == "passed"
    assert doctor_docker.check_gpu_runtime(found, info, 2).status == "passed"


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (127, "", "docker is not installed"),
        (124, "", "the daemon hangs"),
        (1, json.dumps({"ServerErrors": ["Cannot connect to the Docker daemon at unix:///x"]}), "Cannot connect"),
        (1, "permission denied while trying to connect to the Docker daemon socket at unix:///x", "permission denied"),
    ],
)
def test_no_engine(code: int, text: str, words: str) -> None:
    found = readings(commands={"docker info --format {{json .}}": (code, text)})
    report, info = doctor_docker.check_engine(found)
    assert report.status == ("warning" if code == 127 else "failed")
    assert words in report.summary
    assert "--runtime venv" in report.fix
    assert doctor_docker.check_gpu_runtime(found, info, 1).status == "skipped"
    assert doctor_docker.check_plugins(found, info).status == "skipped"


def test_kinds_of_engine() -> None:
    _, _, snap = engine({"DockerRootDir": "/var/snap/docker/common/var-lib-docker"})
    assert (snap.status, snap.data["kinds"]) == ("warning", ["snap"])
    found, info, rootless = engine({"SecurityOptions": ["name=seccomp", "name=rootless"]})
    assert "rootless" in rootless.summary
    runtime = doctor_docker.check_gpu_runtime(found, info, 1)
    assert "rootless: nvidia-ctk" in runtime.fix
    _, _, desktop = engine({"OperatingSystem": "Docker Desktop"})
    assert "Docker Desktop" in desktop.summary
    _, _, old = engine({"ServerVersion": "20.10.24+dfsg1"})
    assert old.status == "warning"


def test_gpus_in_containers() -> None:
    found, info, _ = engine()
    report = doctor_docker.check_gpu_runtime(found, info, 1)
    assert report.status == "failed"
    assert "nvidia-ctk runtime configure" in report.fix
    assert doctor_docker.check_gpu_runtime(found, info, 0).status == "skipped"


def test_cdi_as_the_daemon_sees_it() -> None:
    device = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}
    found, info, _ = engine(device)
    assert doctor_docker.gpu_mode(found, info) == "cdi"
    assert doctor_docker.check_gpu_runtime(found, info, 1).status == "passed"  # the reload trap is not CDI's
    found, info, _ = engine(
        listings={"/etc/cdi/*": ["/etc/cdi/nvidia.yaml"]}, files={"/etc/cdi/nvidia.yaml": "kind: nvidia.com/gpu\n"}
    )
    assert doctor_docker.gpu_mode(found, info) == "cdi"


def test_the_daemon_reload_trap() -> None:
    runtime = {"Runtimes": {"runc": {}, "nvidia": {}}}
    found, info, _ = engine(runtime)
    report = doctor_docker.check_gpu_runtime(found, info, 1)
    assert report.status == "warning"
    assert "daemon-reload" in report.cause
    found, info, _ = engine({**runtime, "CgroupDriver": "cgroupfs"})
    assert doctor_docker.check_gpu_runtime(found, info, 1).status == "passed"


def test_plugins() -> None:
    good = {
        "docker buildx version": (0, "github.com/docker/buildx v0.13.1 x"),
        "docker compose version": (0, "Docker Compose version v2.26.1"),
    }
    found, info, _ = engine(commands=good)
    assert doctor_docker.check_plugins(found, info).status == "passed"
    found, info, _ = engine(
        commands={**good, "docker buildx version": (1, "docker: 'buildx' is not a docker command.")}
    )
    report = doctor_docker.check_plugins(found, info)
    assert report.status == "failed"
    assert "buildx missing" in report.summary


def test_info_is_kept_short() -> None:
    whole = {
        **INFO,
        "Name": "secret-host",
        "Runtimes": {"runc": {"status": "x" * 5000}},
        "ClientInfo": {"Context": "lab"},
    }
    short = json.loads(doctor_docker.shorten_info("WARNING: something\n" + json.dumps(whole)))
    assert "Name" not in short
    assert (short["Runtimes"], short["Context"]) == ({"runc": {}}, "lab")
    assert doctor_docker.shorten_info("no json") == "no json"


# ---- the rest of the host


def test_cores_and_memory() -> None:
    files = {"/proc/meminfo": "MemTotal:       65536000 kB\nSwapTotal:       0 kB\n"}
    found = readings(files=files, facts={"cores": 16})
    assert doctor_host.check_cpu(found, 8).status == "passed"
    assert doctor_host.check_cpu(found, 9).status == "warning"
    assert doctor_host.check_cpu(readings(files=files, facts={"cores": 2}), 0).status == "passed"
    assert doctor_host.check_cpu(readings(), 1).status == "skipped"


def test_swapping_and_governor() -> None:
    base = {"/proc/meminfo": "MemTotal:       65536000 kB\nSwapTotal:       8388604 kB\n"}
    swaps = readings(files={**base, "/proc/sys/vm/swappiness": "60\n"}, facts={"cores": 16})
    assert "swappiness 60" in doctor_host.check_cpu(swaps, 1).summary
    folder = "/sys/devices/system/cpu/cpu0/cpufreq/"

    def governor(driver: str) -> str:
        files = {**base, folder + "scaling_governor": "powersave\n", folder + "scaling_driver": driver}
        return doctor_host.check_cpu(readings(files=files, facts={"cores": 16}), 1).status

    assert governor("acpi-cpufreq\n") == "warning"
    assert governor("intel_pstate\n") == "passed"


def test_disks() -> None:
    def disk(free_gb: float, writable: bool = True) -> Disk:
        return Disk("/x", "/", 10**12, int(free_gb * 1e9), writable)

    assert doctor_host.check_disks({"project and output": disk(50)}, 7).status == "passed"
    assert doctor_host.check_disks({"project and output": disk(5)}, 7).status == "warning"
    assert doctor_host.check_disks({"project and output": disk(50, False)}, 7).status == "warning"
    assert doctor_host.check_disks({"temporary files": disk(0.2)}, 7).status == "failed"
    assert doctor_host.check_disks({"Docker images": disk(6, False)}, 7).status == "failed"
    assert doctor_host.check_disks({"Docker images": disk(20, False)}, 7).status == "passed"
    assert doctor_host.check_disks({}, 7).status == "skipped"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["lo", "docker0", "eno1", "ib0"], ["ib0"]),
        (["lo", "docker0", "eno1", "virbr0"], ["eno1"]),
        (["lo", "docker0", "br-1f2e", "eth0"], ["br-1f2e", "eth0"]),
        (["lo", "docker0"], ["docker0"]),
        (["lo"], ["lo"]),
        ([], []),
    ],
)
def test_interfaces_that_nccl_takes(names: list[str], chosen: list[str]) -> None:
    assert doctor_host.nccl_choice(names) == chosen


def test_network() -> None:
    text = "lo UNKNOWN 127.x.x.x/8\neno1 UP 10.x.x.x/24\neno2 DOWN\nbr-1f2e UP 172.x.x.x/16\nveth1@if2 UP fe80::x/64\n"
    report = doctor_host.check_network(readings(commands={"ip -br addr": (0, text)}))
    assert report.status == "warning"
    assert "NCCL_SOCKET_IFNAME==eno1" in report.fix
    one = doctor_host.check_network(
        readings(commands={"ip -br addr": (0, "lo UNKNOWN 127.x.x.x/8\neno1 UP 10.x.x.x/24\n")})
    )
    assert (one.status, one.data["chosen"]) == ("passed", ["eno1"])
    files = {"/sys/class/net/eth0/operstate": "up\n"}
    sysfs = readings(listings={"/sys/class/net/*": ["/sys/class/net/eth0"]}, files=files)
    assert doctor_host.check_network(sysfs).data["chosen"] == ["eth0"]


def test_ports() -> None:
    line = "   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1\n"
    connected = line.replace(" 0A ", " 01 ").replace("733C", "1772")
    assert doctor_host.listening_ports(["head\n" + line, "head\n" + connected]) == [29500]
    taken = doctor_host.check_ports(readings(facts={"listening ports": [22, 29500]}))
    assert taken.status == "warning"
    assert "29500" in taken.summary
    assert doctor_host.check_ports(readings(facts={"listening ports": [22]})).status == "passed"
    assert doctor_host.check_ports(readings()).status == "skipped"


def test_settings() -> None:
    def status(**environment: str) -> Any:
        return doctor_host.check_settings(readings(facts={"environment": environment}))

    assert status().status == "passed"
    assert "http://mirror" in status(HF_ENDPOINT="http://mirror").summary
    assert status(NCCL_P2P_DISABLE="1").status == "warning"
    assert status(NCCL_NVLS_ENABLE="0").status == "passed"
    assert status(CUDA_VISIBLE_DEVICES="").status == "warning"
    assert status(https_proxy="http://proxy:3128").status == "warning"
    assert status(https_proxy="http://proxy:3128", NO_PROXY="localhost").status == "passed"
    assert status(LD_LIBRARY_PATH="/usr/local/cuda/compat").status == "warning"


def test_what_smoke_is_asked(tmp_path: Path) -> None:
    assert doctor.smoke_arguments("auto", "", False) == []
    inside = doctor.smoke_arguments("2", str(tmp_path / "out" / "s.json"), True, root=tmp_path)
    assert inside == ["--gpus", "2", "--json", "out/s.json", "--sweep"]
    with pytest.raises(Fault, match="inside it"):
        doctor.smoke_arguments("auto", "/elsewhere/s.json", False, root=tmp_path)


# ---- recordings


def test_a_recording_is_judged_as_the_machine_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--record", str(tmp_path), "--json", str(tmp_path / "live.json")])
    capsys.readouterr()
    assert doctor.main(["--from", str(tmp_path), "--json", str(tmp_path / "again.json")]) == code
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("live.json", "again.json"))
    for document in (first, second):
        for report in document["reports"]:
            report["seconds"] = 0
    assert first == second
    assert capsys.readouterr().out.rstrip().endswith(first["verdict"])


def test_recordings_name_nobody() -> None:
    secret = (
        "GPU 0: NVIDIA H200 (UUID: GPU-c7b57be0-94ff-d352-a59b-d0ee00aeed43)\nSerial Number : 1650224042711\n"
        "eth0 UP 10.20.30.40/24 fe80::1c2b:aff:fe00:1/64\nlink/ether 02:42:ac:11:00:02\nhttp://me:word@proxy:3128\n"
    )
    masked = doctor_read._mask(secret)
    for word in ("c7b57be0", "1650224042711", "20.30.40", "1c2b", "02:42:ac", "me:word"):
        assert word not in masked
    assert "580.95.05" in doctor_read._mask("driver 580.95.05")
    assert doctor_read._mask({"bus_id": "00000000:3D:00.0"}) == {"bus_id": "00000000:3D:00.0"}


def test_wrong_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="--record"):
        doctor_read.load(tmp_path)
    (tmp_path / "doctor.json").write_text("{")
    with pytest.raises(Fault, match="no recording"):
        doctor_read.load(tmp_path)
    (tmp_path / "doctor.json").write_text('{"format": 99}')
    with pytest.raises(Fault, match="format 99"):
        doctor_read.load(tmp_path)
    assert doctor.main(["--from", str(tmp_path)]) == 2
    assert doctor.main(["--cuda", "9.9"]) == 2


#: Machines that were really recorded with --record, and the verdict on each.
RECORDED = {
    "cpu-debian-12": "use ./inv build --cuda 12.1",
    "one-h200-virtual-machine": "use ./inv build --cuda 13.0",
}


def test_recorded_machines_are_judged() -> None:
    assert {path.name for path in RECORDINGS.iterdir()} == set(RECORDED)
    for name, verdict in RECORDED.items():
        assert doctor.verdict(doctor.examine(doctor_read.load(RECORDINGS / name), VARIANTS)) == verdict
