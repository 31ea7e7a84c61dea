"""What the host knows about reaching registries is read from where users keep it, and handed on with care."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.host import network

# As pip 26 prints it, with values of every kind.
CONFIG_LIST = """\
:env:.cert='/etc/ssl/own.crt'
:env:.timeout='180'
global.cert='/somewhere/else.crt'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='file:///opt/simple https://mirror.example/extra/simple'
global.find-links='/opt/wheels'
global.index-url='https://user:secret@mirror.example/simple'
install.index-url='https://install.example/simple'
list.format='columns'
"""


def test_variables_win_over_install_and_install_over_global() -> None:
    found = network.parse_pip_configuration(CONFIG_LIST)
    assert found["cert"] == "/etc/ssl/own.crt"
    assert found["index-url"] == "https://install.example/simple"
    assert "format" not in found


def test_only_what_means_the_same_in_a_container_goes_there() -> None:
    text = network.portable_pip_file(network.parse_pip_configuration(CONFIG_LIST))
    assert "index-url = https://install.example/simple" in text
    assert "https://mirror.example/extra/simple" in text
    assert "timeout = 180" in text
    assert "/opt" not in text
    assert "constraint" not in text


def test_no_configuration_gives_no_file() -> None:
    assert network.portable_pip_file({"find-links": "/opt/wheels", "extra-index-url": "file:///opt"}) == ""


def test_uv_gets_the_index_and_the_certificates_of_pip(tmp_path: Path) -> None:
    bundle = tmp_path / "own.crt"
    bundle.write_text("x")
    made = network.uv_environment({"HOME": "/h"}, {"index-url": "https://mirror.example/simple", "cert": str(bundle)})
    assert made["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert made["SSL_CERT_FILE"] == str(bundle)
    assert made["HOME"] == "/h"


def test_an_index_set_for_uv_itself_wins() -> None:
    made = network.uv_environment({"UV_DEFAULT_INDEX": "https://a.example"}, {"index-url": "https://b.example"})
    assert made["UV_DEFAULT_INDEX"] == "https://a.example"


def test_a_named_bundle_wins_and_a_missing_one_is_passed_over(tmp_path: Path) -> None:
    bundle = tmp_path / "own.crt"
    bundle.write_text("x")
    assert network.certificates({"PIP_CERT": str(bundle)}) == bundle
    assert network.certificates({"SSL_CERT_FILE": str(tmp_path / "gone"), "PIP_CERT": str(bundle)}) == bundle


@pytest.mark.parametrize(
    ("environment", "names", "local"),
    [
        ({}, [], False),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, ["HTTPS_PROXY"], False),
        ({"https_proxy": "http://127.0.0.1:7890", "no_proxy": "localhost"}, ["https_proxy", "no_proxy"], True),
        ({"all_proxy": "socks5h://localhost:1080"}, ["all_proxy"], True),
        ({"HTTP_PROXY": "127.0.0.1:7890"}, ["HTTP_PROXY"], True),
        ({"NO_PROXY": "127.0.0.1"}, ["NO_PROXY"], False),
    ],
)
def test_proxies_are_found_and_one_on_this_host_is_known(
    environment: dict[str, str], names: list[str], local: bool
) -> None:
    assert network.proxies(environment) == names
    assert network.proxy_is_local(environment) is local
