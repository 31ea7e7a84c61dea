"""What docker compose needs to know of this host: .env and, where there is something to add, an overlay file.

Both are written by ``./inv build`` (and by the first ``./inv train``), so that a plain ``docker compose run train``
does the same afterwards: same variant, same uid, same GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors

from app.errors import WRONG_MACHINE, Fault
from app.host import engine, network
from app.host.variants import ROOT, Variant, file_hash

FILE = "docker-compose.yml"
OVERLAY = ".compose.host.yml"
SETTINGS = ".env"
FIRST_USER = 1000  #: what a first user has on nearly every Linux, and the image's own user
CERTIFICATES = "/etc/kit-ca.crt"  #: where containers see the user's certificate authorities
HEADER = "# docker compose reads this file. ./inv build writes the lines below; lines of your own stay."
OURS = (
    "KIT_VARIANT",
    "KIT_IMAGE",
    "KIT_BASE",
    "KIT_UID",
    "KIT_GID",
    "KIT_GPUS",
    "KIT_COMPOSE",
    "KIT_CA_FILE",
    "COMPOSE_FILE",
)


@dataclass(frozen=True)
class Owner:
    """Who owns what a container writes."""

    uid: int
    gid: int
    why: str


def owner(root: Path, rootless: bool, environment: Mapping[str, str] = os.environ, euid: int | None = None) -> Owner:
    """The caller; never root, but for a rootless engine, whose uid 0 is the caller."""
    euid = os.geteuid() if euid is None else euid
    if rootless:
        return Owner(0, 0, "rootless engine: its uid 0 is you")
    if euid:
        return Owner(euid, os.getegid(), "you")
    if environment.get("SUDO_UID", "0") != "0":
        return Owner(int(environment["SUDO_UID"]), int(environment.get("SUDO_GID", "0")), "the user behind sudo")
    folder = root.stat()
    if folder.st_uid:
        return Owner(folder.st_uid, folder.st_gid, f"the owner of {root}")
    return Owner(FIRST_USER, FIRST_USER, "you are root, and containers never write as root")


def make_out(root: Path, who: Owner) -> str | None:
    """Make ./out writable for that owner where this process is root; a sentence if anything was changed."""
    out = root / "out"
    if os.geteuid() or who.uid == 0:
        return None
    out.mkdir(exist_ok=True)
    if out.stat().st_uid == who.uid:
        return None
    os.chown(out, who.uid, who.gid)
    return f"{out} now belongs to {who.uid}:{who.gid} ({who.why})"


def settings_text(old: str, values: Mapping[str, str]) -> str:
    """Text of .env: the lines of the user's own as they were, ours anew."""
    kept = [line for line in old.splitlines() if line != HEADER and line.split("=", 1)[0].strip() not in OURS]
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join([*kept, HEADER, *(f"{key}={value}" for key, value in values.items()), ""])


def overlay(
    gpus: engine.Gpus, services: Mapping[str, Mapping[str, Any]], certificates: Path | None, lock_memory: bool
) -> dict[str, Any]:
    """What this host adds to the compose file; may be empty.

    Services labelled ``kit.gpus`` get all GPUs, and unlimited locked memory where the engine may grant that (transfers
    from pinned memory over a network want it); every service sees the user's certificate authorities.
    """
    device: dict[str, Any] | None = None
    if gpus.mode == "cdi":
        device = {"driver": "cdi", "device_ids": [f"{engine.CDI_KIND}=all"], "capabilities": ["gpu"]}
    elif gpus.mode == "nvidia":
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    result: dict[str, Any] = {}
    for service, content in services.items():
        added: dict[str, Any] = {}
        if "kit.gpus" in (content.get("labels") or {}):
            if device:
                added["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            if lock_memory:
                added["ulimits"] = {"memlock": -1}
        if certificates:
            added["volumes"] = [f"{certificates}:{CERTIFICATES}:ro"]
            added["environment"] = {
                name: CERTIFICATES for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
            }
        if added:
            result[service] = added
    return {"services": result} if result else {}


def services(root: Path = ROOT) -> dict[str, Any]:
    """The services of the compose file, as docker compose itself reads them."""
    command = [
        "docker",
        "compose",
        "--project-directory",
        str(root),
        "-f",
        str(root / FILE),
        "config",
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fault(
            f"docker compose cannot read {root / FILE}; it needs the compose plugin, 2.20 or newer (Debian: "
            "docker-compose). "
            f"It says: {done.stderr.strip()}",
            WRONG_MACHINE,
        )
    return dict(json.loads(done.stdout)["services"])


def write(client: docker.DockerClient, variant: Variant, base_image: str | None, root: Path = ROOT) -> str:
    """Write .env and the overlay for a variant whose image is there; returns a paragraph that says what was found."""
    with engine.told("asking the engine about GPUs"):
        info = client.info()
    gpus = engine.gpu_access(info, engine.host_has_gpus())
    who = owner(root, engine.is_rootless(info))
    named = {key: value for key, value in os.environ.items() if key in network.CERTIFICATE_VARIABLES}
    certificates = network.certificates(named, network.pip_configuration()) if named else None
    bundle = network.certificates()
    image = image_id(client, variant)
    added = overlay(gpus, services(root), certificates, engine.may_lock_memory(client, image))
    values = {
        "KIT_VARIANT": variant.cuda,
        "KIT_IMAGE": f"{variant.image}@{image}",
        **({"KIT_BASE": base_image} if base_image else {}),
        "KIT_UID": str(who.uid),
        "KIT_GID": str(who.gid),
        "KIT_GPUS": gpus.mode,
        "KIT_COMPOSE": file_hash(root / FILE)[:12],
        **({"KIT_CA_FILE": str(bundle)} if bundle else {}),
        **({"COMPOSE_FILE": f"{FILE}:{OVERLAY}"} if added else {}),
    }
    path = root / OVERLAY
    if added:
        _replace(path, "# Made by ./inv build for this host; JSON is YAML.\n" + json.dumps(added, indent=2) + "\n")
    else:
        path.unlink(missing_ok=True)
    target = root / SETTINGS
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    _replace(target, settings_text(old, values))
    if os.geteuid() == 0 and who.uid:
        for made in (target, path):
            if made.exists() and root.stat().st_uid == who.uid:
                os.chown(made, who.uid, who.gid)
    lines = [
        f"{SETTINGS}: compose uses {variant.image} as {who.uid}:{who.gid} ({who.why})",
        f"GPUs: {gpus.mode}: {gpus.reason}" + (f". To use them: {engine.TOOLKIT}" if gpus.blocked else ""),
        make_out(root, who),
    ]
    return "\n".join(line for line in lines if line)


def is_stale(client: docker.DockerClient, root: Path = ROOT) -> bool:
    """Whether .env is missing, or the engine gives GPUs otherwise or the compose file says otherwise than when it was made."""
    found = read_settings(root)
    with engine.told("asking the engine about GPUs"):
        gpus = engine.gpu_access(client.info(), engine.host_has_gpus())
    return found.get("KIT_GPUS") != gpus.mode or found.get("KIT_COMPOSE") != file_hash(root / FILE)[:12]


def image_id(client: docker.DockerClient, variant: Variant) -> str:
    """Digest of a variant's image. Raises Fault where it was not built."""
    with engine.told(f"looking for {variant.image}"):
        try:
            return str(client.images.get(variant.image).id)
        except docker.errors.ImageNotFound:
            raise Fault(f"no image {variant.image}: run ./inv build --cuda {variant.cuda}", WRONG_MACHINE) from None


def read_settings(root: Path = ROOT) -> dict[str, str]:
    """The values in .env, empty where there is none."""
    path = root / SETTINGS
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
