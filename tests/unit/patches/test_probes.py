"""How a probe of a patch is judged, and the installed package without a patch that it runs on."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import link_packages
from tests.patches.conftest import Outcome

ECHO = """Traceback (most recent call last):
  File "probe.py", line 9, in <module>
    assert got, "the weights are stale"
           ^^^
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (f"before\n{ECHO}NameError: name 'got' is not defined\n", "NameError: name 'got' is not defined"),
        (f"{ECHO}AssertionError: one\n two\n", "AssertionError: one\n two"),
        (
            f"{ECHO}KeyError: 1\n\nDuring handling of the above exception, ...\n\n{ECHO}OSError: no\n",
            "OSError: no",
        ),
        ("".join(f"[rank1]: {line}\n" for line in f"{ECHO}OSError: no".splitlines()), "OSError: no"),
        (f"{ECHO}OSError: no\nException ignored in: <a.__del__>\n{ECHO}KeyError: 1\n", "OSError: no"),
        ("first\nafter 30 s it still waits\n\n", "after 30 s it still waits"),
        ("", ""),
    ],
    ids=["echoed source", "several lines", "chained", "a rank's", "ignored", "no exception", "nothing"],
)
def test_the_reason_is_the_final_exception_alone(output: str, reason: str) -> None:
    assert Outcome(1, output).reason == reason


def test_only_the_files_without_the_patch_differ_from_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, replaced, target = (tmp_path / name for name in ("installed", "replaced", "target"))
    monkeypatch.syspath_prepend(installed)
    for name, text in {"a/__init__.py": "", "a/b.py": "x = 'patched'", "a/c/d.py": "x = 'same'"}.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text, encoding="utf-8")
    stale = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash"]
    subprocess.run([*stale, str(installed)], check=True)
    (replaced / "a").mkdir(parents=True)
    (replaced / "a" / "b.py").write_text("x = 'without'", encoding="utf-8")
    link_packages(replaced, target)
    code = "import a.b, a.c.d; print(a.b.x, a.c.d.x, a.__path__[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["without", "same", str(target / "a")]
