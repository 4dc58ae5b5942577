"""Symbols of shared objects, and the names of torch for ROCm by those of torch for CUDA."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.hip import symbols

PAIRS = [
    ("_ZN3c103hip19getCurrentHIPStreamEa", "_ZN3c104cuda20getCurrentCUDAStreamEa"),
    (
        "_ZN3c103hip19getStreamFromExternalEP12ihipStream_ta",
        "_ZN3c104cuda19getStreamFromExternalEP11CUstream_sta",
    ),
    ("_ZNK3c103hip9HIPStream6streamEv", "_ZNK3c104cuda10CUDAStream6streamEv"),
    ("_ZN2at10TensorBaseD2Ev", "_ZN2at10TensorBaseD2Ev"),
]


@pytest.mark.parametrize(("of_hip", "of_cuda"), PAIRS)
def test_names_are_translated_with_their_lengths(of_hip: str, of_cuda: str) -> None:
    assert symbols.of_cuda(of_hip) == of_cuda
    assert symbols.of_hip(of_cuda) == of_hip


def test_an_extension_defines_its_module_and_needs_the_c_library() -> None:
    core = find_spec("msgspec._core")
    assert core
    assert core.origin
    found = symbols.read(Path(core.origin).read_bytes())
    assert "PyInit__core" in found.defined
    assert {"memcpy", "PyErr_SetString"} <= found.undefined
    assert any(name.startswith("libc.so") for name in found.needed)
