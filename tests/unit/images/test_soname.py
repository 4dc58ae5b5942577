"""An object that requires a library of torch's wheel by its SONAME, as DeepSpeed's fused Adam does HIP."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.image.test_libraries import LOADED, trace

HIP = LOADED[1]
pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")


def link(target: Path, code: str, *arguments: str | Path) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-xnone", *arguments, "-o", target]
    subprocess.run(command, input=code, text=True, check=True)
    return target


def test_a_loaded_library_is_found_by_its_soname(tmp_path: Path) -> None:
    """The loader finds it only if it is loaded first: torch's own libraries require it by its file name."""
    torch = tmp_path / "torch"
    torch.mkdir()
    hip = link(torch / HIP, "int f(void) {return 1;}", f"-Wl,-soname,{HIP}.6")
    by_file = link(tmp_path / HIP, "int f(void) {return 1;}", f"-Wl,-soname,{HIP}")
    c10 = link(torch / "libc10_hip.so", "int f(void); int g(void) {return f();}", by_file)
    adam = link(tmp_path / "adam.so", "int f(void); int g(void); int h(void) {return f() + g();}", hip, c10)
    assert trace([adam], [torch]).libraries == {f"{HIP}.6"}
    found = trace([hip, adam], [torch])
    assert not found.libraries | found.symbols
