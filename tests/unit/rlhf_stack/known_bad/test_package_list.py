"""rlhf_stack.known_bad.package_list: versions in the formats in which people paste them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.known_bad.package_list import PackageList, read_versions

COLLECT_ENV = """\
PyTorch version              : 2.7.0+cu126
Libc version                 : glibc-2.34
Python version               : 3.12.6 (main, Mar  2 2025, 12:20:51) [GCC 11.4.1] (64-bit runtime)
CMake version: version 3.31.1
Stepping:                    7
[pip3] numpy==1.26.4
[conda] triton                    3.1.0                   pypi_0    pypi
vLLM Version                 : 0.10.0
ROCM Version                 : Could not collect
        GPU0    CPU Affinity    NUMA Affinity
"""
PIP_LIST = """\
Package            Version      Editable project location
------------------ ------------ -------------------------
openrlhf           0.5.1        /src/OpenRLHF
ray                2.9.3
vllm               0.4.2+stack.1
"""
CONDA_LIST = """\
# packages in environment at /opt/conda:
# Name                    Version                   Build  Channel
pytorch                   2.5.1           py3.10_cuda12.4_cudnn9.1.0_0    pytorch
"""
PIP_SHOW = """\
Name: torch
Version: 2.6.0
Summary: Tensors
Requires: filelock, triton
Required-by: vllm
---
Name: vllm
Version: 0.8.5
"""
UV_LOCK = """\
version = 1
requires-python = ">=3.11"

[[package]]
name = "ray"
version = "2.46.0"
source = { registry = "https://index.example/simple" }
dependencies = [
    { name = "click" },
]
"""
UV_TREE = """\
Resolved 3 packages in 2ms
openrlhf v0.9.0
├── torch v2.3.0
│   ├── filelock v3.13.1
│   └── triton v2.3.0 [required: ==2.3.0]
└── ray[default] v2.12.0 (*)
(*) Package tree already displayed
"""
INSPECT = json.dumps(
    [{"Config": {"Labels": {"io.rlhf-stacks.version.ray": "2.55.0", "org.image.version": "main"}, "Env": []}}]
)


@pytest.mark.parametrize(
    ("text", "versions", "lines"),
    [
        (
            COLLECT_ENV,
            {
                "torch": "2.7.0+cu126",
                "glibc": "2.34",
                "python": "3.12.6",
                "numpy": "1.26.4",
                "triton": "3.1.0",
                "vllm": "0.10.0",
            },
            6,
        ),
        (PIP_LIST, {"openrlhf": "0.5.1", "ray": "2.9.3", "vllm": "0.4.2+stack.1"}, 3),
        ('[{"name": "ray", "version": "2.9.3"}]', {"ray": "2.9.3"}, 1),
        (CONDA_LIST, {"torch": "2.5.1"}, 1),
        ("dependencies:\n  - pytorch=2.5.1=py3.10\n  - pip:\n    - vllm==0.8.5\n", None, 2),
        (PIP_SHOW, {"torch": "2.6.0", "vllm": "0.8.5"}, 2),
        (UV_LOCK, {"ray": "2.46.0"}, 1),
        (INSPECT, {"ray": "2.55.0"}, 1),
        ("ray[default]==2.42.0\nray[default,serve]==2.43.0\n", {"ray": "2.43.0"}, 2),
        ("- Ray: 2.46.0\n* **vLLM** version: `v0.8.4`\nray, version 2.40.0\n", None, 3),
        ("torch==2.13.0 \\\n    --hash=sha256:00\nray==2.55.0 ; python_version > '3'\n", None, 2),
        ("ray==2.55.0\nstep 12 of 28, loss 0.3\nGPU 0: NVIDIA H100\nlr=1.0e-6\n", {"ray": "2.55.0"}, 1),
        (
            UV_TREE,
            {
                "openrlhf": "0.9.0",
                "torch": "2.3.0",
                "filelock": "3.13.1",
                "triton": "2.3.0",
                "ray": "2.12.0",
            },
            5,
        ),
        (
            "vllm @ git+https://host/vllm.git@v0.8.4\nverl[gpu] @ git+ssh://git@host/verl@0.5.0#egg=verl\n",
            None,
            2,
        ),
        ("[" * 100_000, {}, 0),
    ],
    ids=[
        *("collect_env", "pip list", "pip list --format json", "conda list", "conda env export", "pip show"),
        *("uv.lock", "docker inspect", "extras", "words", "a hashed lock", "prose", "uv pip tree", "a tag"),
        "deep JSON",
    ],
)
def test_versions_are_read_from_what_people_paste(
    text: str, versions: dict[str, str] | None, lines: int
) -> None:
    found = read_versions(text)
    assert (found.lines, found.skipped) == (lines, ())
    assert versions is None or found.versions == versions


@pytest.mark.parametrize(
    "text",
    [
        "torch==foo\nvllm==0.19.1\n",
        "torch @ file:///wheels/torch-foo-cp311-cp311-linux_x86_64.whl\nvllm==0.19.1\n",
        '[{"name": "torch", "version": "foo"}, {"name": "vllm", "version": "0.19.1"}]',
        "Name: torch\nVersion: foo\nName: vllm\nVersion: 0.19.1\n",
    ],
)
def test_a_version_that_is_none_is_skipped(text: str) -> None:
    found = read_versions(text)
    assert (found.versions, found.lines, found.skipped) == ({"vllm": "0.19.1"}, 1, ("torch==foo",))


@pytest.mark.parametrize(
    ("line", "skipped"),
    [
        ("vllm @ git+https://host/vllm.git@1a2b3c4", "vllm @ git+https://..."),
        ("vllm[audio] @ git+https://user:secret@host/vllm.git@main", "vllm @ git+https://..."),
        ("numpy @ file:///croot/numpy_1707225380409/work", "numpy @ file://..."),
        ("-e git+https://host/vllm.git@1a2b3c4#egg=vllm", "vllm @ git+https://..."),
    ],
)
def test_an_address_without_a_version_is_skipped(line: str, skipped: str) -> None:
    assert read_versions(f"ray==2.9.3\n{line}\n") == PackageList({"ray": "2.9.3"}, 1, (skipped,))


@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    found = read_versions(text)
    assert len(found.versions) <= found.lines
