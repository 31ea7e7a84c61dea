"""The variants are data: what their files say fits together, and a wrong name or file is a sentence."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import WRONG_INPUT, Fault
from app.host.variants import (
    PINNED,
    ROOT,
    choose,
    choose_several,
    default_variant,
    locked_versions,
    locks_date,
    normal_name,
    read_variant,
    variants,
)

ALL = variants()
TEXTS = sorted(path for path in PINNED.rglob("*") if path.is_file())


def test_there_are_variants_and_one_is_the_default() -> None:
    assert len(ALL) >= 3
    assert default_variant().cuda in ALL
    assert list(ALL) == sorted(ALL, key=lambda name: [int(part) for part in name.split(".")])


@pytest.mark.parametrize("name", ALL)
def test_the_lock_holds_what_variant_toml_says(name: str) -> None:
    variant = ALL[name]
    locked = variant.locked()
    assert locked["torch"] == variant.torch
    assert locked.get("triton") == variant.triton
    assert locked["transformers"] == variant.huggingface["transformers"]
    assert locked["accelerate"] == variant.huggingface["accelerate"]
    nccl = [version for package, version in locked.items() if package.startswith("nvidia-nccl")]
    assert nccl in ([variant.nccl], [])  # none: NCCL is linked into torch
    cudnn = [version for package, version in locked.items() if package.startswith("nvidia-cudnn")]
    assert cudnn[0].startswith(variant.cudnn)
    assert variant.can["compile"] == (variant.triton is not None)
    assert ("gcc" in variant.packages) == (variant.triton is not None)


@pytest.mark.parametrize("name", ALL)
def test_drivers_and_architectures_are_in_order(name: str) -> None:
    variant = ALL[name]
    floor, native = ([int(part) for part in one.split(".")] for one in (variant.driver_floor, variant.driver_native))
    assert floor <= native
    numbers = [int(one.removeprefix("sm_")) for one in variant.architectures]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(PINNED)))
def test_no_address_of_a_registry_is_pinned(path: Path) -> None:
    assert "://" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(PINNED.glob("*/requirements.txt")), ids=lambda path: path.parent.name)
def test_every_locked_package_has_a_hash(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+==\S+)(.*(?:\n    .*)*)", text, re.MULTILINE)
    assert len(entries) >= 30
    assert [entry for entry, rest in entries if "--hash=sha256:" not in rest] == []


@pytest.mark.parametrize("path", sorted(PINNED.glob("*/requirements.in")), ids=lambda path: path.parent.name)
def test_every_pin_gives_its_reason(path: Path) -> None:
    """A line with a version stands right under the comment that says why."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [number for number, line in enumerate(lines) if re.match(r"[A-Za-z0-9-]+\s*[<=]", line)]
    assert [lines[number] for number in pins if not lines[number - 1].startswith("#")] == []


def test_compose_falls_back_to_the_default_variant() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"KIT_VARIANT:-([^}]+)", text)) == {default_variant().cuda}


def test_an_unknown_variant_is_wrong_input_and_names_the_ones_there_are() -> None:
    with pytest.raises(Fault) as caught:
        choose("9.9")
    assert caught.value.code == WRONG_INPUT
    assert "9.9" in str(caught.value)
    assert all(name in str(caught.value) for name in ALL)


def test_several_variants_can_be_asked_for() -> None:
    names = list(ALL)
    assert [one.cuda for one in choose_several("all")] == names
    assert [one.cuda for one in choose_several(f"{names[0]}, {names[-1]}")] == [names[0], names[-1]]
    assert [one.cuda for one in choose_several(None)] == [default_variant().cuda]


def test_the_environment_names_the_variant_where_the_command_line_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    last = list(ALL)[-1]
    monkeypatch.setenv("KIT_VARIANT", last)
    assert choose(None).cuda == last
    monkeypatch.setenv("KIT_VARIANT", "nonsense")
    with pytest.raises(Fault, match="KIT_VARIANT"):
        choose(None)


def copy(tmp_path: Path) -> Path:
    """A copy of pinned/ to break."""
    return Path(shutil.copytree(PINNED, tmp_path / "pinned"))


def test_a_second_default_is_refused(tmp_path: Path) -> None:
    pinned = copy(tmp_path)
    for path in pinned.glob("*/variant.toml"):
        path.write_text(path.read_text(encoding="utf-8").replace("default = false", "default = true"), encoding="utf-8")
    with pytest.raises(Fault, match="exactly one"):
        default_variant(pinned)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("cuda = ", "cuda == ", "no TOML"),
        ("default = ", "standard = ", "'default'"),
        ('cuda = "', 'cuda = "0', "folder"),
    ],
)
def test_a_broken_variant_file_is_named_with_its_fault(tmp_path: Path, old: str, new: str, word: str) -> None:
    folder = copy(tmp_path) / default_variant().cuda
    path = folder / "variant.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(Fault, match=word):
        read_variant(folder)


def test_a_missing_lock_names_the_command_that_makes_it(tmp_path: Path) -> None:
    folder = copy(tmp_path) / default_variant().cuda
    (folder / "requirements.txt").unlink()
    with pytest.raises(Fault, match=f"./inv lock --cuda {default_variant().cuda}"):
        _ = read_variant(folder).lock_hash


def test_the_date_of_the_locks_is_a_whole_day() -> None:
    assert locks_date() > 1_700_000_000
    assert locks_date() % 86_400 == 0


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}([-._][a-z0-9]{1,4}){0,2}", fullmatch=True)
VERSIONS = st.from_regex(r"[1-9][0-9]?(\.[0-9]{1,2}){0,3}(rc1|\.post1|\+cu118)?", fullmatch=True)


@given(st.dictionaries(NAMES, VERSIONS, min_size=1, max_size=8))
def test_versions_are_read_back_from_a_lock(packages: dict[str, str]) -> None:
    """Whatever names and versions a lock holds, with hashes, markers and comments between them, they are read back."""
    lines = ["# a comment with name==1.0"]
    for name, version in packages.items():
        lines += [f"{name}=={version} ; sys_platform == 'linux' \\", "    --hash=sha256:00", "    # via other==2"]
    expected = {normal_name(name): version for name, version in packages.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "requirements.txt")
        path.write_text("\n".join(lines), encoding="utf-8")
        assert locked_versions(path) == expected
