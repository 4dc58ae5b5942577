"""The user's pip configuration."""

import os
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.locks import index_config
from scripts.locks.index_config import PipConfig, parse


def test_variables_win_over_files(tmp_path: Path) -> None:
    """As in pip itself."""
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    listing = (
        f":env:.cert='{bundle}'\nglobal.cert='/nowhere'\nglobal.index-url='https://index.example/simple'\n"
    )
    config = parse(listing, {})
    assert config.certificate == bundle
    assert config.index == "https://index.example/simple"


def test_folders_of_this_machine_stay_out_of_the_portable_form(tmp_path: Path) -> None:
    """The build runs elsewhere: it is given the wheels, not their path."""
    listing = (
        f"global.find-links='{tmp_path} /nowhere'\n"
        f"global.extra-index-url='file://{tmp_path}/simple https://extra.example/simple'\n"
    )
    config = parse(listing, {})
    assert config.find_links == (tmp_path,)
    assert config.extra == ("https://extra.example/simple",)
    assert config.portable() == "[global]\nextra-index-url = https://extra.example/simple\n"


def test_certificate_falls_back_to_that_of_other_tools(tmp_path: Path) -> None:
    """A machine behind a TLS proxy often says it only to requests or curl."""
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    assert parse("", {"REQUESTS_CA_BUNDLE": str(bundle)}).certificate == bundle


def test_a_page_of_wheels_reaches_the_build() -> None:
    config = parse("global.find-links='https://wheels.example/page.html file:///nowhere'\n", {})
    assert config.links == ("https://wheels.example/page.html",)
    assert config.portable() == "[global]\nfind-links = https://wheels.example/page.html\n"


def test_a_trusted_host_reaches_the_build() -> None:
    config = parse("global.trusted-host='a.example\\nb.example'\n", {})
    assert config.portable() == "[global]\ntrusted-host = a.example b.example\n"


def test_a_setting_that_does_not_reach_the_build_is_named(tmp_path: Path) -> None:
    listing = (
        f"global.find-links='{tmp_path} /nowhere'\n"
        "global.extra-index-url='file:///opt/simple https://extra.example/simple'\n"
    )
    assert [line.partition(":")[0] for line in parse(listing, {}).unsupported] == [
        "extra-index-url file",
        "find-links /nowhere",
    ]


def test_the_proxy_of_pip_wins_over_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in pip; the variables of other tools are kept."""
    environment = {"HTTPS_PROXY": "http://old:1", "no_proxy": "localhost", "NO_COLOR": "1"}
    assert parse("", environment).proxies == {"https_proxy": "http://old:1", "no_proxy": "localhost"}
    config = parse("global.proxy='http://new:2'\n", environment)
    assert config.proxies == {
        "http_proxy": "http://new:2",
        "https_proxy": "http://new:2",
        "no_proxy": "localhost",
    }
    assert "new" not in config.portable()
    monkeypatch.setattr(os, "environ", environment)
    assert config.environment() == {"NO_COLOR": "1", **config.proxies}


def test_nothing_configured_is_nothing_passed_on() -> None:
    """The tools' own defaults hold."""
    assert PipConfig().portable() == "[global]\n"


def test_settings_are_read_as_pip_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder, a relative folder, a backslash, and a section that has precedence."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.pem").touch()
    (tmp_path / "wheels").mkdir()
    listing = (
        "global.cert='~/ca.pem'\nglobal.find-links='~/wheels wheels'\ninstall.index-url='https://second/'\n"
        "global.index-url='https://first/'\nglobal.proxy='http://domain\\\\user:pw@proxy:3128'\n"
    )
    config = parse(listing, {})
    assert config.certificate == tmp_path / "ca.pem"
    assert config.find_links == (tmp_path / "wheels",) * 2
    assert config.index == "https://second/"
    assert config.proxies["http_proxy"] == "http://domain\\user:pw@proxy:3128"


def test_a_missing_certificate_and_no_index_are_named() -> None:
    unsupported = parse("global.cert='/nowhere/ca.pem'\nglobal.no-index='true'\n", {}).unsupported
    assert [line.partition(":")[0] for line in unsupported] == ["cert /nowhere/ca.pem", "no-index"]


def test_a_configuration_that_pip_cannot_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "pip.conf"
    broken.write_text("[global\nindex-url = https://private/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(broken))
    with pytest.raises(UserError, match="pip's configuration cannot be read"):
        index_config.load()
