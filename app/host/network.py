"""What the host already knows about reaching package registries: certificates, index, proxies. Nothing is stored here.

Company networks and countries with slow lines need these, and every tool reads another place: pip its configuration
file, uv its own variables, a build inside a container nothing at all. They are read once from where the user keeps them
and handed on; none of them ends in an image or in a lock.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
#: Keys of a pip configuration that mean the same inside a container; paths of this host do not.
PORTABLE_PIP_KEYS = ("index-url", "extra-index-url", "proxy", "timeout", "retries", "trusted-host")


def pip_configuration() -> dict[str, str]:
    """What pip would use: its configuration files and PIP_ variables, later ones winning, by key without section."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse_pip_configuration(done.stdout) if done.returncode == 0 else {}


def parse_pip_configuration(text: str) -> dict[str, str]:
    """The values of ``pip config list``: variables win over ``install`` sections, those over ``global`` ones."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        place, equals, value = line.partition("=")
        section, _, key = place.partition(".")
        if equals and section in rank and rank[section] >= found.get(key, (-1, ""))[0]:
            found[key] = (rank[section], str(ast.literal_eval(value)))
    return {key: value for key, (_, value) in found.items()}


def certificates(environment: Mapping[str, str] = os.environ, pip: Mapping[str, str] | None = None) -> Path | None:
    """The bundle of certificate authorities that this host trusts, or None where none is found.

    A variable of the user's wins, then pip's ``cert``, then the system's bundle, where companies put their own.
    """
    named = [environment.get(name, "") for name in CERTIFICATE_VARIABLES] + [(pip or {}).get("cert", "")]
    for place in [*named, *SYSTEM_BUNDLES]:
        if place and Path(place).is_file():
            return Path(place)
    return None


def portable_pip_file(pip: Mapping[str, str]) -> str:
    """Text of a pip.conf for use inside a container; empty where the user set nothing of that kind."""
    lines = []
    for key in PORTABLE_PIP_KEYS:
        values = pip.get(key, "").split()
        if key in ("index-url", "extra-index-url"):
            values = [value for value in values if urlsplit(value).scheme in ("http", "https")]
        if values:
            lines.append(f"{key} = " + "\n    ".join(values))
    return "\n".join(["[global]", *lines, ""]) if lines else ""


def uv_environment(environment: Mapping[str, str] = os.environ, pip: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which uv reaches what pip reaches: uv does not read pip's configuration."""
    pip = pip_configuration() if pip is None else pip
    result = dict(environment)
    index = pip.get("index-url", "")
    if index and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & environment.keys():
        result["UV_DEFAULT_INDEX"] = index
    bundle = certificates(environment, pip)
    if bundle:
        result.setdefault("SSL_CERT_FILE", str(bundle))
    if pip.get("timeout"):
        result.setdefault("UV_HTTP_TIMEOUT", pip["timeout"])
    return result


def proxies(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the proxy variables that are set, in the spelling in which they are."""
    return [name for upper in PROXY_VARIABLES for name in (upper, upper.lower()) if environment.get(name)]


def proxy_is_local(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a proxy listens on this host's loopback, which a container reaches on the host's network only."""
    for name in proxies(environment):
        if name.upper() == "NO_PROXY":
            continue
        value = environment[name]
        host = urlsplit(value if "//" in value else f"//{value}").hostname or ""
        if host in ("localhost", "::1") or host.startswith("127."):
            return True
    return False
