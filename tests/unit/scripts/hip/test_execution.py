"""The emulator: what is refused, how a launch reaches it, and a kernel that ends it."""

import ctypes
import struct
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import UserError
from scripts.hip import emulate, execution
from scripts.hip.cases import FLOAT, Case, Launch, Work
from scripts.hip.execution import CHECKOUT, EMULATOR, Executor
from scripts.hip.inspection import VLLM_0_4


def test_a_missing_or_different_emulator_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUT, raising=False)
    with pytest.raises(UserError, match=f"{CHECKOUT} is not set: clone tinygrad"):
        execution.checkout()
    monkeypatch.setenv(CHECKOUT, str(tmp_path))
    with pytest.raises(UserError, match=r"emu\.py is missing: clone tinygrad/tinygrad at"):
        execution.checkout()
    source = tmp_path / EMULATOR
    source.parent.mkdir(parents=True)
    source.write_text("def run_asm(): ...\n")
    with pytest.raises(UserError, match="has no 'def _decode_at\\('"):
        execution.checkout()
    source.write_text("\n".join(execution.USED))
    assert execution.checkout() == tmp_path


def case(name: str) -> Case:
    zero, one = FLOAT.encode([0.0]), FLOAT.encode([1.0])
    launch = Launch("scale", (1, 1, 1), 64, ({"buffer": 0},))
    return Case(name, FLOAT, VLLM_0_4, lambda: Work((zero, one), (launch,), {1: (FLOAT, [1.0])}))


def test_a_case_that_ends_the_emulator_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(
        "#!/usr/bin/env python3\nimport json, sys\nfor line in sys.stdin:\n    job = json.loads(line)\n"
        "    if job['id'].startswith('crash'):\n        sys.exit('segmentation fault')\n"
        "    if job['id'].startswith('refused'):\n        result = {'error': 'unimplemented'}\n"
        "    else:\n        result = {'buffers': [job['buffers'][1]]}\n"
        "    print(json.dumps(result | {'id': job['id'], 'seconds': 0.1}), flush=True)\n"
    )
    docker.chmod(0o755)
    monkeypatch.setattr(execution, "docker_command", lambda: [str(docker)])
    monkeypatch.setattr(Executor, "_job", job)
    chosen = [case("first"), case("crash"), case("refused"), case("last")]
    executor = Executor("root", tmp_path / "code", tmp_path, {})
    found = {one.kernel: outcome for one, outcome in executor.run("gfx90a", chosen)}
    assert {name: outcome.error for name, outcome in found.items()} == {
        "first": 0.0,
        "crash": None,
        "refused": None,
        "last": 0.0,
    }
    assert found["crash"].reason == "the emulator ended with 1: segmentation fault"
    assert found["refused"].reason == "unimplemented"


def test_an_answer_to_another_case_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two runs shared the file of jobs."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho \'{"id": "other"}\'\nexec sleep 60\n')
    docker.chmod(0o755)
    monkeypatch.setattr(execution, "docker_command", lambda: [str(docker)])
    monkeypatch.setattr(Executor, "_job", job)
    executor = Executor("root", tmp_path / "code", tmp_path, {})
    with pytest.raises(UserError, match="the emulator answered other instead of one"):
        list(executor.run("gfx90a", [case("one")]))


def job(_: Executor, _architecture: str, case: Case, work: Work) -> dict[str, Any]:
    return {"id": case.id, "buffers": [content.hex() for content in work.buffers]}


def test_arguments_are_packed_by_the_kernel_s_metadata() -> None:
    launch = {
        "values": [{"buffer": 1}, {"integer": -2}, {"bytes": "00" * 16, "pointers": [(8, 0)]}],
        "arguments": [
            ("global_buffer", 0, 8),
            ("by_value", 8, 4),
            ("by_value", 16, 16),
            ("hidden_block_count_y", 32, 4),
            ("hidden_group_size_x", 36, 2),
            ("hidden_dynamic_lds_size", 40, 4),
            ("hidden_queue_ptr", 48, 8),
        ],
        "grid": (1, 5, 1),
        "block": (64, 1, 1),
        "lds": 2048,
    }
    packed = emulate.arguments(launch, [0x1000, 0x2000])
    assert struct.unpack_from("<Qi4xQQIH2xI", packed) == (0x2000, -2, 0, 0x1000, 5, 64, 2048)
    with pytest.raises(RuntimeError, match="more values than the kernel has arguments"):
        emulate.arguments({**launch, "arguments": []}, [0x1000, 0x2000])


@pytest.mark.parametrize(("first", "base"), [(0xDC500000, 0x7F), (0xDC508000, 0), (0x7E000000, 0)])
def test_only_a_flat_instruction_loses_its_scalar_base(first: int, base: int) -> None:
    words = (ctypes.c_uint32 * 2)(first, 0)
    emulate.without_base(ctypes.addressof(words))
    assert (words[0], words[1] >> 16) == (first, base)


def test_the_scratch_memory_of_a_case_is_the_most_of_its_kernels_on_the_gpu(tmp_path: Path) -> None:
    def code(gpu: str, *sizes: int) -> tuple[str, bytes, dict[str, Any]]:
        kernels = [
            {".name": name, ".private_segment_fixed_size": size}
            for name, size in zip(("scale", "reduce"), sizes, strict=True)
        ]
        return gpu, gpu.encode(), {"amdhsa.kernels": kernels}

    launches = tuple(Launch(name, (1, 1, 1), 64, ()) for name in ("scale", "reduce"))
    both = Case("both", FLOAT, VLLM_0_4, lambda: Work((), launches, {}))
    executor = Executor("root", tmp_path, tmp_path, {})
    executor.codes = {VLLM_0_4: [code("gfx90a", 0, 724), code("gfx942", 0, 0)]}
    assert [executor.scratch(gpu, both) for gpu in ("gfx90a", "gfx942")] == [724, 0]
