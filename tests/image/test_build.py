"""The packages and files that the image contains, and those that it must not contain."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, PackagePath
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc", "hipcc", "ld", "make", "ninja-build")
NAME = re.compile(r"[\w.-]+")


def test_a_compiler_is_present_only_with_a_reason(cell: dict[str, Any]) -> None:
    """The matrix gives the reason if the base has a compiler."""
    wanted = [item["name"] for item in cell["base"]["runtime"] if item["name"] in COMPILERS]
    found = [name for name in COMPILERS if shutil.which(name)]
    assert (found != []) == (wanted != []), (found, wanted)
    assert set(wanted) <= set(found)


def test_cpu_image_has_no_cuda_packages(cell: dict[str, Any], installed: dict[str, Distribution]) -> None:
    """Exempt is an image whose torch, the index's only build, does not load without them."""
    import torch

    if cell["accelerator"]["kind"] != "cpu" or torch.version.cuda:
        pytest.skip("this image is for GPUs, or its torch is a build for them")
    assert [name for name in installed if name.startswith(("nvidia-", "triton"))] == []


def test_excluded_packages_are_absent(cell: dict[str, Any], installed: dict[str, Distribution]) -> None:
    """Packages that the matrix excludes are absent, unless this image builds them from source."""
    added = {build["package"] for build in cell["build_from_source"]}
    assert [item["name"] for item in cell["excluded"] if item["name"] in {*installed} - added] == []


def test_deepspeed_ops_are_precompiled(cell: dict[str, Any], tmp_path: Path) -> None:
    """The ops that the matrix builds load without a compiler, and write nothing to the extensions folder."""
    settings = [item for build in cell["build_from_source"] for item in build["env"]]
    flags = [
        item["name"] for item in settings if item["name"].startswith("DS_BUILD_") and item["value"] == "1"
    ]
    if not flags:
        pytest.skip("the matrix builds no op for this cell")
    script = (
        "import json, sys; from deepspeed.ops.op_builder.all_ops import ALL_OPS\n"
        "wanted = json.loads(sys.argv[1])\n"
        "built = [op for op in ALL_OPS.values() if op.BUILD_VAR in wanted]\n"
        "assert len(built) == len(wanted), (ALL_OPS, wanted)\n"
        "for op in built: op.load(verbose=False)\n"
    )
    kind = "cpu" if cell["accelerator"]["kind"] == "cpu" else "cuda"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": kind}
    command = [sys.executable, "-c", script, json.dumps(flags)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_compiled_operators_do_not_contain_the_random_name_of_their_build_folder(
    cell: dict[str, Any], installed: dict[str, Distribution]
) -> None:
    """The same inputs would otherwise give another image with every build."""
    built = [build.get("recipe") or build["package"] for build in cell["build_from_source"]]
    files = [file for name in built for file in installed[name].files or [] if file.suffix == ".so"]
    if not files:
        pytest.skip("the matrix builds no op for this cell")
    paths = [Path(str(file.locate())) for file in files]
    assert [str(path) for path in paths if re.search(rb"/tmp/(pip-|tmp)", path.read_bytes())] == []


@pytest.mark.timeout(600)
def test_records_match_the_files(installed: dict[str, Distribution]) -> None:
    """Every file that a package lists exists with its hash, also in patched or trimmed packages."""
    listed = [file for distribution in installed.values() for file in distribution.files or []]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [problem for problem in pool.map(difference, listed) if problem]
    assert wrong == []


def difference(file: PackagePath) -> str:
    """Return how an installed file differs from its entry in RECORD; "" if it matches."""
    path = Path(str(file.locate()))
    if not path.exists():
        return f"{file} is missing"
    if file.hash is None or file.suffix == ".pyc":  # recompiled in the image
        return ""
    return f"{file} differs" if file.hash.value != record_hash(path) else ""


def record_hash(path: Path) -> str:
    """Return the SHA-256 of a file in RECORD's encoding."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def test_pip_refuses_to_move_a_pin() -> None:
    """A derived image that requires another version of a pinned package fails to build, with the reason."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "ray==0.0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "constraint" in (done.stdout + done.stderr).lower()


def test_pip_check_finds_only_what_the_matrix_explains(cell: dict[str, Any]) -> None:
    """The matrix explains each excluded or overridden requirement, and each third-party build."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    absent = {canonicalize_name(item["name"]) for item in cell["excluded"]}
    overridden = {canonicalize_name(NAME.match(item["requirement"])[0]) for item in cell["overrides"]}  # type: ignore[index]
    foreign = {
        canonicalize_name(package["distribution"])
        for package in cell["packages"]
        if package["distribution"] != package["name"]
    }
    assert [
        line for line in done.stdout.splitlines() if not explained(line, absent, overridden, foreign)
    ] == []


def explained(line: str, absent: set[str], overridden: set[str], foreign: set[str]) -> bool:
    """Return whether a line of `pip check` is one of the exceptions."""
    if line == "No broken requirements found.":
        return True
    for pattern, names in (
        (r".* requires (?P<name>[\w.-]+), which is not installed\.", absent),
        (r".* has requirement (?P<name>[\w.-]+).*", overridden),
        (r"(?P<name>\S+) \S+ is not supported on this platform", foreign),
    ):
        if (found := re.fullmatch(pattern, line)) and canonicalize_name(found["name"]) in names:
            return True
    return False


@pytest.mark.parametrize("package", ["torch", "vllm", "ray", "deepspeed", "openrlhf", "rlhf_stack"])
def test_imported_modules_have_bytecode(package: str) -> None:
    """With a read-only root Python cannot write bytecode, and would recompile in every process."""
    folder = Path(str(getattr(importlib.util.find_spec(package), "origin", None))).parent
    modules = {file.stem for file in folder.glob("*.py")}
    assert modules <= {file.name.split(".")[0] for file in (folder / "__pycache__").glob("*.pyc")}
