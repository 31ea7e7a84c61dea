"""The driver and architecture rules, held against the release notes' rows and the wheels' measured kernel lists."""

from __future__ import annotations

import pytest

from app.hardware.drivers import (
    MINOR_VERSION,
    NATIVE,
    TOO_OLD,
    TOOLKIT_DRIVERS,
    UNKNOWN,
    judge_driver,
    native_driver,
    newest_cuda,
    numbers,
    serves,
)

#: What the wheels of the three variants were measured to hold (torch._C._cuda_getArchFlags()).
KERNELS = {
    "11.7": ["sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86"],
    "12.1": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
    "13.0": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
}


def test_the_table_rises() -> None:
    drivers = [numbers(driver) for _, driver in TOOLKIT_DRIVERS]
    releases = [numbers(release) for release, _ in TOOLKIT_DRIVERS]
    assert drivers == sorted(drivers)
    assert releases == sorted(releases)
    assert not any(release.startswith("12.7") for release, _ in TOOLKIT_DRIVERS)


@pytest.mark.parametrize(
    ("driver", "cuda", "kind"),
    [
        ("450.80.01", "11.7", TOO_OLD),
        ("450.80.02", "11.7", MINOR_VERSION),
        ("515.43.04", "11.7", MINOR_VERSION),
        ("515.48.07", "11.7", NATIVE),
        ("470.161.03", "12.1", TOO_OLD),
        ("525.60.12", "12.1", TOO_OLD),
        ("525.60.13", "12.1", MINOR_VERSION),
        ("530.30.02", "12.1", NATIVE),
        ("580.159.04", "12.1", NATIVE),
        ("575.57.08", "13.0", TOO_OLD),
        ("580.65.06", "13.0", NATIVE),
        ("580.65.06", "14.0", UNKNOWN),
    ],
)
def test_driver_against_variant(driver: str, cuda: str, kind: str) -> None:
    verdict = judge_driver(driver, cuda)
    assert verdict.kind == kind
    assert verdict.runs == (kind in (NATIVE, MINOR_VERSION))
    assert driver in verdict.sentence()


def test_an_old_but_sufficient_driver_names_what_it_cannot_do() -> None:
    assert "torch.compile" in judge_driver("525.60.13", "12.1").sentence()
    assert "torch.compile" not in judge_driver("530.30.02", "12.1").sentence()


def test_native_drivers_are_those_of_the_release_notes() -> None:
    assert {cuda: native_driver(cuda) for cuda in KERNELS} == {
        "11.7": "515.48.07",
        "12.1": "530.30.02",
        "13.0": "580.65.06",
    }
    assert newest_cuda("535.104.05") == "12.2.2"
    assert newest_cuda("418.40.04") is None
    assert native_driver("12.7") is None


def test_a_version_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="N/A"):
        judge_driver("N/A", "12.1")


#: Every pair of GPU generation and variant: (capability, variants whose kernels run on it).
GENERATIONS = [
    ((3, 5), set()),
    ((3, 7), {"11.7"}),
    ((5, 2), {"11.7", "12.1"}),
    ((6, 1), {"11.7", "12.1"}),
    ((7, 0), {"11.7", "12.1"}),
    ((7, 5), {"11.7", "12.1", "13.0"}),
    ((8, 0), {"11.7", "12.1", "13.0"}),
    ((8, 6), {"11.7", "12.1", "13.0"}),
    ((8, 9), {"11.7", "12.1", "13.0"}),
    ((9, 0), {"12.1", "13.0"}),
    ((10, 0), {"13.0"}),
    ((10, 3), {"13.0"}),
    ((12, 0), {"13.0"}),
    ((12, 1), {"13.0"}),
]


@pytest.mark.parametrize(("capability", "variants"), GENERATIONS)
def test_kernels_serve(capability: tuple[int, int], variants: set[str]) -> None:
    assert {name for name, kernels in KERNELS.items() if serves(kernels, capability)} == variants


def test_ptx_and_odd_names_do_not_count_as_machine_code() -> None:
    assert not serves(["compute_120"], (12, 0))
    assert serves(["sm_90a"], (9, 0))
    assert not serves([], (9, 0))


def test_code_for_a_higher_minor_or_another_major_version_does_not_run() -> None:
    assert not serves(["sm_87"], (8, 6))
    assert not serves(["sm_86"], (8, 0))
    assert serves(["sm_80"], (8, 9))
    assert not serves(["sm_90"], (8, 9))
    assert not serves(["sm_100"], (12, 0))
