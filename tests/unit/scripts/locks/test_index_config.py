"""The user's pip configuration."""

from pathlib import Path

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


def test_nothing_configured_is_nothing_passed_on() -> None:
    """The tools' own defaults hold."""
    assert PipConfig().portable() == "[global]\n"
