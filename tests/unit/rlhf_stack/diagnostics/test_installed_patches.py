"""rlhf_stack.diagnostics.installed_patches: whether the installed packages have the patches."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.cli.main import main
from rlhf_stack.diagnostics import installed_patches

MANIFEST = {
    "package": "pkg",
    "version": "1.0",
    "label": "stack.1",
    "patches": [
        {"name": "0001-a.patch", "title": "a", "files": [{"path": "x.py", "before": "0", "after": "1"}]},
        {"name": "0002-b.patch", "title": "b", "files": [{"path": "y.py", "before": "p", "after": "q"}]},
        {
            "name": "0003-c.patch",
            "title": "c",
            "files": [
                {"path": "x.py", "before": "1", "after": "2"},
                {"path": "y.py", "before": "q", "after": "r"},
            ],
        },
    ],
}


def states(**files: str | None) -> list[str]:
    found = installed_patches.patch_statuses([MANIFEST], lambda _, path: files[path.removesuffix(".py")])
    return [report.state for report in found]


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("2", "r", ["present", "present", "present"]),
        ("0", "p", ["missing", "missing", "missing"]),
        ("1", "q", ["present", "present", "missing"]),
        ("2", "p", ["present", "missing", "missing"]),
        ("2", "edited", ["present", "altered", "altered"]),
        ("2", None, ["present", "missing", "missing"]),
    ],
    ids=["as built", "reinstalled", "last one lost", "one file lost", "edited", "file removed"],
)
def test_each_patch_is_present_missing_or_altered(x: str, y: str | None, expected: list[str]) -> None:
    assert states(x=x, y=y) == expected


@given(st.sampled_from(["0", "1", "2", "edited", None]), st.sampled_from(["p", "q", "r", "edited", None]))
def test_all_present_means_exactly_as_built(x: str | None, y: str | None) -> None:
    assert (set(states(x=x, y=y)) == {"present"}) == (x == "2" and y == "r")


def test_a_report_names_the_files() -> None:
    found = installed_patches.patch_statuses([MANIFEST], lambda _, path: "2" if path == "x.py" else "edited")
    assert found[2].why == "y.py"
    assert found[0].why == ""


def test_the_command_fails_if_a_patch_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed_patches, "manifests", lambda: [MANIFEST])
    monkeypatch.setattr(
        installed_patches, "installed_checksum", lambda _, path: {"x.py": "2", "y.py": "p"}[path]
    )
    assert main(["patches", "--json"]) == 1
    assert [report["state"] for report in json.loads(capsys.readouterr().out)["patches"]] == [
        "present",
        "missing",
        "missing",
    ]
    assert main(["patches"]) == 1
    assert "remedy: " in capsys.readouterr().out


def test_a_replaced_package_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(installed_patches, "manifests", lambda: [MANIFEST])
    monkeypatch.setattr(installed_patches, "installed_version", lambda _: "1.0")
    monkeypatch.setattr(
        installed_patches, "installed_checksum", lambda _, path: {"x.py": "2", "y.py": "r"}[path]
    )
    installed_patches.warn_of_replaced_packages()
    assert (main(["patches", "--changes"]), capsys.readouterr().out, caplog.text) == (0, "", "")
    monkeypatch.setattr(
        installed_patches, "installed_checksum", lambda _, path: {"x.py": "0", "y.py": "p"}[path]
    )
    installed_patches.warn_of_replaced_packages()
    assert main(["patches", "--changes"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rlhf-stack: pkg 1.0 is not this image's 1.0+stack.1: 3 of 3 patches")
    assert line.removeprefix("rlhf-stack: ") in caplog.text


def test_without_manifests_the_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches"]) == 1
    assert "built without patched wheels" in capsys.readouterr().out


def test_a_package_that_is_not_installed_has_no_checksum() -> None:
    assert installed_patches.installed_checksum("no-such-package-at-all", "x.py") is None
