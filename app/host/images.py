"""Builds the image of a variant, proves it, and only then gives it its name.

The SDK has no BuildKit, so the build itself is ``docker buildx``, its progress shown live; all else asks the engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import docker.errors

from app.errors import WRONG_INPUT, WRONG_MACHINE, Fault
from app.host import base, compose, engine, network
from app.host.variants import IMAGE, ROOT, Variant, choose, locks_date

PROOF_COMMAND = ["python", "-m", "app.smoke.proof"]
PROOF_USER = "54321:54321"  #: a uid that no image knows, as a caller's may be
WHEELS_GIGABYTES = 3.5  #: what the wheel cache of one variant takes during a build, 10^9 bytes
SOURCES = (
    "Dockerfile",
    ".dockerignore",
    "pyproject.toml",
    "app",
)  #: with the variant's folder: what an image is made of


def build(
    chosen: list[Variant],
    base_choice: str | None = None,
    no_cache: bool = False,
    root: Path = ROOT,
    *,
    switch: bool = True,
) -> None:
    """Build, prove and name the image of each variant, then write .env so that compose uses it.

    With several variants compose gets the default one; without ``switch`` it keeps the one that it has.

    Raises Fault before anything was made where the machine does not fit, and with no name given where the proof fails.
    """
    client = engine.connect()
    buildx()
    with engine.told("asking the engine what it is"):
        info = client.info()
    check_disk([variant for variant in chosen if not is_built(client, variant)], info)
    source = base.resolve(client, base_choice, root)
    print(f"base: {source.why}", flush=True)
    for variant in chosen:
        image = build_one(variant, source, no_cache, root)
        prove(client, variant, image)
        name(client, variant, image)
    use = next((variant for variant in chosen if variant.default), chosen[-1])
    if not switch:
        use = in_use(client, use, root)
    print(compose.write(client, use, source.image, root))


def ensure(variant: Variant, root: Path = ROOT) -> None:
    """Build the variant's image unless the one that is there was made from these very files."""
    client = engine.connect()
    with engine.told(f"looking for {variant.image}"):
        try:
            labels = client.images.get(variant.image).labels
        except docker.errors.ImageNotFound:
            print(f"no image {variant.image} yet: building it (some minutes, once)", flush=True)
            labels = None
    if labels is not None and labels.get("kit.source") == source_hash(variant, root):
        if compose.is_stale(client, root):
            print(compose.write(client, in_use(client, variant, root), labels.get("kit.base"), root), flush=True)
        return
    if labels is not None:
        print(f"{variant.image} was made from other files than these: building it anew", flush=True)
    build([variant], labels.get("kit.base") or None if labels else None, root=root, switch=False)


def in_use(client: docker.DockerClient, otherwise: Variant, root: Path = ROOT) -> Variant:
    """The variant that .env names where its image is there, so that running another one once does not switch it."""
    named = compose.read_settings(root).get("KIT_VARIANT")
    if named and client.images.list(filters={"reference": f"{IMAGE}:{named}"}):
        return choose(named, root / "pinned")
    return otherwise


def buildx() -> None:
    """Raises Fault where the docker command or its buildx plugin is missing."""
    if not shutil.which("docker"):
        raise Fault(f"no docker command on PATH: {engine.INSTALL}", WRONG_MACHINE)
    done = subprocess.run(["docker", "buildx", "version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fault(
            f"the docker command has no buildx plugin, which builds the image: install docker-buildx-plugin "
            f"(Debian: docker-buildx). It says: {(done.stderr or done.stdout).strip()}",
            WRONG_MACHINE,
        )


def check_disk(missing: list[Variant], info: Mapping[str, Any]) -> None:
    """Raises Fault where the engine's disk cannot hold these images and the wheels that they are made from."""
    free = engine.free_gigabytes(info)
    needed = sum(variant.gigabytes + WHEELS_GIGABYTES for variant in missing)
    if free is not None and free < needed:
        names = ", ".join(variant.image for variant in missing)
        raise Fault(
            f"the disk under {info['DockerRootDir']} has {free:.1f} GB free, building {names} takes {needed:.1f} GB: "
            f"make room (docker system df, docker builder prune) or set data-root in /etc/docker/daemon.json to a larger "
            f"disk",
            WRONG_MACHINE,
        )


def is_built(client: docker.DockerClient, variant: Variant) -> bool:
    """Whether an image of this very lock is there: its large layers then need no new room."""
    with engine.told(f"looking for {variant.image}"):
        try:
            return client.images.get(variant.image).labels.get("kit.lock") == variant.lock_hash
        except docker.errors.ImageNotFound:
            return False


def source_hash(variant: Variant, root: Path = ROOT) -> str:
    """sha256 over the names and bytes of every file that the image is made from, tests aside."""
    found = hashlib.sha256()
    for place in (*(root / part for part in SOURCES), variant.folder):
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
        for path in files:
            if "__pycache__" in path.parts:
                continue
            found.update(str(path.relative_to(root)).encode() + b"\0")
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def labels(variant: Variant, source: base.Base, root: Path = ROOT) -> dict[str, str]:
    """The labels that tell what an image holds; read them with docker inspect."""
    found = {
        "kit.variant": variant.cuda,
        "kit.lock": variant.lock_hash,
        "kit.source": source_hash(variant, root),
        "kit.base": source.image or "",
        "kit.torch": variant.torch,
        "kit.cudnn": variant.cudnn,
        "kit.nccl": variant.nccl,
        "kit.driver": variant.driver_floor,
        "kit.architectures": " ".join(variant.architectures),
    }
    if revision := git_revision(root):
        found["org.opencontainers.image.revision"] = revision
    return found


def git_revision(root: Path = ROOT) -> str:
    """The commit of the checkout, with ``-dirty`` where it was changed since; empty where there is no git."""
    if not shutil.which("git"):
        return ""
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def build_one(variant: Variant, source: base.Base, no_cache: bool = False, root: Path = ROOT) -> str:
    """Build one image and return its id; it has no name yet. Raises Fault where the build fails."""
    if not variant.lock.exists():
        raise Fault(f"{variant.lock} is missing: run ./inv lock --cuda {variant.cuda}", WRONG_INPUT)
    print(f"building {variant.image}: {variant.summary}", flush=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kit-build-")))
        told = scratch / "image-id"
        command = [
            *("docker", "buildx", "build", "--builder", builder(), "--load", "--provenance=false"),
            *("--iidfile", str(told), "--build-arg", f"CUDA={variant.cuda}"),
            *("--build-arg", f"SOURCE_DATE_EPOCH={locks_date(root / 'pinned')}"),
            *("--build-arg", f"KIT_REVISION={git_revision(root)}"),
            *(["--build-arg", f"KIT_BASE={source.image}"] if source.image else []),
            *(["--no-cache"] if no_cache else []),
            *(word for key, value in labels(variant, source, root).items() for word in ("--label", f"{key}={value}")),
            *reach(scratch),
            str(root),
        ]
        done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise Fault(
                f"the build of {variant.image} failed (docker buildx ended with {done.returncode}; its own words are "
                "above). "
                "If a registry could not be reached: pip's index-url and proxy variables of this shell are used in the "
                f"build; then run ./inv build --cuda {variant.cuda} again, finished steps are kept",
                WRONG_MACHINE,
            )
        return told.read_text().strip()


def builder() -> str:
    """Name of the builder that is the engine itself: another one would not see the engine's own images."""
    if os.environ.get("DOCKER_HOST"):
        return "default"
    done = subprocess.run(["docker", "context", "show"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "default"


def reach(scratch: Path) -> list[str]:
    """Options that let the build reach registries as this host does: secrets and predefined arguments, in no layer."""
    pip = network.pip_configuration()
    options: list[str] = []
    bundle = network.certificates(pip=pip)
    if bundle:
        options += ["--secret", f"id=ca,src={bundle}"]
    text = network.portable_pip_file(pip)
    if text:
        path = scratch / "pip.conf"
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        options += ["--secret", f"id=pip,src={path}"]
    mirror = os.environ.get("KIT_APT_SOURCES")
    if mirror:
        if not Path(mirror).is_file():
            raise Fault(f"KIT_APT_SOURCES is '{mirror}', which is no file: give a sources.list for Debian bookworm")
        options += ["--secret", f"id=apt,src={mirror}"]
    for name_ in network.proxies():
        options += ["--build-arg", name_]
    if network.proxy_is_local():
        options += ["--network", "host"]
    return options


def prove(client: docker.DockerClient, variant: Variant, image: str) -> None:
    """Run the proof inside an image. A failed one is removed and raises Fault."""
    if proof(client, variant, image):
        discard(client, image)
        raise Fault(
            f"{variant.image} was built but does not hold what its lock says (what differs stands above), so it "
            "got no name: "
            f"run ./inv lock --cuda {variant.cuda} if you changed requirements.in, and ./inv build --cuda "
            f"{variant.cuda} again",
            WRONG_MACHINE,
        )


def proof(client: docker.DockerClient, variant: Variant, image: str) -> int:
    """Exit code of the proof inside an image, its output shown: no network, no capabilities, an unknown uid."""
    print(f"proving {variant.image} ({image[:19]}): every import, every version, a training step", flush=True)
    return engine.run(
        client,
        image,
        PROOF_COMMAND,
        user=PROOF_USER,
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        environment={"NVIDIA_VISIBLE_DEVICES": "void"},
        write=_write,
    )


def verify(chosen: list[Variant]) -> None:
    """Prove images that are there, as build does, and compare their lock with the one here. Changes nothing."""
    client = engine.connect()
    for variant in chosen:
        image = compose.image_id(client, variant)
        with engine.told(f"reading the labels of {variant.image}"):
            held = client.images.get(image).labels.get("kit.lock")
        if held != variant.lock_hash:
            raise Fault(
                f"{variant.image} was made from another lock ({str(held)[:12]}) than {variant.lock} "
                f"({variant.lock_hash[:12]}): "
                f"run ./inv build --cuda {variant.cuda}",
                WRONG_MACHINE,
            )
        if proof(client, variant, image):
            raise Fault(
                f"{variant.image} does not hold what its lock says (what differs stands above): run ./inv build --cuda "
                f"{variant.cuda} --no-cache",
                WRONG_MACHINE,
            )


def discard(client: docker.DockerClient, image: str) -> None:
    """Remove an image that proved wrong, with every name it has."""
    with engine.told(f"removing {image[:19]}"):
        client.images.remove(image, force=True)


def name(client: docker.DockerClient, variant: Variant, image: str) -> None:
    """Give a proven image its name, say its size, and let go of the one that had the name before."""
    with engine.told(f"naming {variant.image}"):
        try:
            old = client.images.get(variant.image).id
        except docker.errors.ImageNotFound:
            old = None
        found = client.images.get(image)
        found.tag(variant.image)
        size = found.attrs["Size"] / 1e9
        print(f"{variant.image} is ready: {size:.2f} GB, {image}", flush=True)
        if old and old != image:
            try:
                client.images.remove(old)
            except docker.errors.APIError as error:
                if error.status_code != 409:  # in use by a container, or named elsewhere too: it stays
                    raise


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
