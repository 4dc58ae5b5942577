"""Compilation of a DeepSpeed operator: serialized, logged, and not blocked by killed processes."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack.compat import deepspeed_ops

HOLD = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
time.sleep(600)
"""
COMPILE = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from rlhf_stack.compat import deepspeed_ops
with deepspeed_ops.compilation_lock("fused_adam", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def other(script: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a process that runs ``script`` until it is killed; return once it holds its lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(deepspeed_ops.__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_lock_of_a_killed_process_is_removed_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch leaves the lock when its process is killed, and would itself wait for ever."""
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    with other(HOLD, str(lock)) as process:
        process.kill()
    assert lock.exists()
    with deepspeed_ops.compilation_lock("fused_adam", tmp_path, timeout=5):
        assert not lock.exists()
    assert capsys.readouterr().err.splitlines() == [
        f"rlhf-stack: removed {lock}, the stale lock of a process that was killed while it compiled",
        f"rlhf-stack: compiling DeepSpeed's fused_adam, about a minute, in {tmp_path}",
    ]


def test_lock_of_a_live_process_is_not_removed(tmp_path: Path) -> None:
    """The wait has a deadline, and its error names the lock."""
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    with other(HOLD, str(lock)) as process:
        with (
            pytest.raises(TimeoutError, match=f"waited 0 s: a live process holds {lock}"),
            deepspeed_ops.compilation_lock("fused_adam", tmp_path, timeout=0.3),
        ):
            pass
        assert lock.exists()
        process.kill()


def test_compilations_are_serialized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second logs what it waits for, and continues when the first is killed."""
    with other(COMPILE, str(tmp_path)) as process:
        with (
            pytest.raises(TimeoutError, match="another process compiles DeepSpeed's fused_adam"),
            deepspeed_ops.compilation_lock("fused_adam", tmp_path, timeout=0.3),
        ):
            pass
        assert "waiting for another process" in capsys.readouterr().err
        process.kill()
    with deepspeed_ops.compilation_lock("fused_adam", tmp_path, timeout=5):
        pass
    assert "waiting" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Muon"])
@pytest.mark.parametrize("gpu", [False, True])
def test_torch_adam_is_selected_by_deepspeeds_own_switch(
    monkeypatch: pytest.MonkeyPatch, kind: str, gpu: bool
) -> None:
    """If the operator is unavailable, only the switch changes, and the caller's section is unchanged."""
    monkeypatch.setattr(deepspeed_ops, "load_adam_operator", lambda _: False)
    monkeypatch.setattr("rlhf_stack.accelerator.devices.is_gpu", lambda: gpu)
    config = {"type": kind, "params": {"lr": 1e-6}}
    switch = {"torch_adam": True} | ({"fused": gpu} if kind == "AdamW" else {})
    assert deepspeed_ops.optimizer_config(config, offload=False) == {
        "type": kind,
        "params": {"lr": 1e-6} | switch,
    }
    assert config == {"type": kind, "params": {"lr": 1e-6}}


@pytest.mark.parametrize("gpu", [False, True])
def test_torchs_own_adamw_is_fused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """Not by its constructor, which torch 2.3 refuses for parameters that are still on the CPU."""
    torch = MagicMock()
    torch.optim.AdamW.return_value.param_groups = groups = [{"fused": None}, {"fused": None}]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(deepspeed_ops, "load_adam_operator", lambda _: False)
    monkeypatch.setattr("rlhf_stack.accelerator.devices.is_gpu", lambda: gpu)
    deepspeed_ops.adam_class(offload=False)([], lr=1e-6)
    torch.optim.AdamW.assert_called_once_with([], lr=1e-6)
    assert groups == [{"fused": gpu}] * 2


@pytest.mark.parametrize(
    ("accelerator", "home", "missing"),
    [
        ("cpu", None, []),
        ("cuda", "CUDA_HOME", []),
        ("cuda", None, ["nvcc"]),
        ("cuda", "ROCM_HOME", ["nvcc"]),
        ("rocm", "ROCM_HOME", []),
        ("rocm", "CUDA_HOME", ["hipcc"]),
    ],
)
def test_an_operator_for_gpus_needs_the_compiler_of_its_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: str, home: str | None, missing: list[str]
) -> None:
    extension = MagicMock(CUDA_HOME=None, ROCM_HOME=None)
    if home:
        setattr(extension, home, str(tmp_path))
    for module in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, module, MagicMock(cpp_extension=extension))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / ("hipcc" if home == "ROCM_HOME" else "nvcc")).touch()
    monkeypatch.setenv("RLHF_STACK_ACCELERATOR", accelerator)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    assert deepspeed_ops.missing_build_tools() == missing


def lacks(monkeypatch: pytest.MonkeyPatch, *missing: str) -> list[str]:
    """Simulate that no operator is built and tools are ``missing``; return the list of later loads."""
    loaded: list[str] = []
    monkeypatch.setattr(deepspeed_ops, "is_built", lambda _: False)
    monkeypatch.setattr(deepspeed_ops, "missing_build_tools", lambda: list(missing))
    monkeypatch.setattr(deepspeed_ops, "load", loaded.append)
    return loaded


@pytest.mark.parametrize(
    ("installed", "built_for", "image", "missing"),
    [
        ({"cpu_adam": True}, "cpu", "cpu", []),
        ({"cpu_adam": True}, "cuda", "cuda", []),
        ({"cpu_adam": True}, "cuda", "rocm", []),  # DeepSpeed calls ROCm CUDA, as torch does
        ({"cpu_adam": True}, "cuda", "cpu", ["nvcc"]),  # built for the other accelerator
        ({"cpu_adam": False}, "cpu", "cpu", ["nvcc"]),
        ({"fused_adam": True}, "cpu", "cpu", ["nvcc"]),
        (None, "cpu", "cpu", ["nvcc"]),  # from source, without a build
    ],
)
def test_whether_the_optimiser_can_run_on_the_cpu_is_read_from_the_installed_deepspeed(
    installed: dict[str, bool] | None,
    built_for: str,
    image: str,
    missing: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without its import, as `plan` runs without a GPU."""

    def missing_tools() -> list[str]:
        print("No CUDA runtime is found", file=sys.stderr)
        return ["nvcc"]

    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise AssertionError('imported')")
    if installed is not None:
        text = f"version='0.19.6'\ninstalled_ops={installed}\naccelerator_name='{built_for}'\nx=open\n"
        (tmp_path / "deepspeed" / deepspeed_ops.INSTALLED).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RLHF_STACK_ACCELERATOR", image)
    monkeypatch.setattr(deepspeed_ops, "missing_build_tools", missing_tools)
    assert deepspeed_ops.missing_for(deepspeed_ops.CPU_ADAM) == missing
    assert capsys.readouterr().err == ""


def test_without_deepspeed_nothing_is_known_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert deepspeed_ops.missing_for(deepspeed_ops.CPU_ADAM) == []


def test_without_a_compiler_torch_adam_is_used_and_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only rank 0 logs the replacement."""
    loaded = lacks(monkeypatch, "C++ compiler", "nvcc")
    assert not deepspeed_ops.load_adam_operator(offload=False)
    assert "(no C++ compiler, no nvcc): torch.optim.AdamW is used instead" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert not deepspeed_ops.load_adam_operator(offload=False)
    assert capsys.readouterr().err == ""
    assert loaded == []


def test_without_a_compiler_an_offloaded_optimiser_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the operator, the missing tool and the remedy."""
    lacks(monkeypatch, "nvcc")
    with pytest.raises(RuntimeError, match=r"cpu_adam .*\(no nvcc\): train without"):
        deepspeed_ops.load_adam_operator(offload=True)


@pytest.mark.parametrize(("offload", "name"), [(False, "fused_adam"), (True, "cpu_adam")])
def test_with_a_compiler_the_operator_is_compiled(
    monkeypatch: pytest.MonkeyPatch, offload: bool, name: str
) -> None:
    """The operator is compiled before DeepSpeed loads it."""
    loaded = lacks(monkeypatch)
    assert deepspeed_ops.load_adam_operator(offload)
    assert loaded == [name]


def test_a_lock_is_not_stale_while_a_build_holds_its_own(tmp_path: Path) -> None:
    """The builder may be on another node: then no process of this one has the lock open."""
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    with other(COMPILE, str(tmp_path)) as process:
        lock.touch()
        assert deepspeed_ops.stale_locks(tmp_path) == []
        assert not deepspeed_ops.remove_stale_lock(lock)
        process.kill()
    assert deepspeed_ops.stale_locks(tmp_path) == [lock]
    assert deepspeed_ops.remove_stale_lock(lock)
    assert not lock.exists()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the file system have no locks."""
    refusal = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=refusal))


@pytest.mark.usefixtures("no_locks")
def test_without_locks_on_a_file_system_torchs_own_serializes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing shows then whether the owner of torch's lock is alive on another node: it is not removed."""
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    lock.touch()
    with deepspeed_ops.compilation_lock("cpu_adam", tmp_path, timeout=0.3):
        assert lock.exists()
    assert capsys.readouterr().err == f"rlhf-stack: no locks on this file system: {tmp_path}\n"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_on_a_file_system_a_lock_is_not_known_to_be_free(tmp_path: Path) -> None:
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    lock.touch()
    (tmp_path / deepspeed_ops.FLOCK_FILE).touch()
    assert deepspeed_ops.stale_locks(tmp_path) == []
    assert not deepspeed_ops.remove_stale_lock(lock)


def test_a_young_lock_is_not_stale(tmp_path: Path) -> None:
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    lock.touch()
    assert deepspeed_ops.stale_locks(tmp_path, 60.0) == []
    assert not deepspeed_ops.remove_stale_lock(lock, 60.0)
    os.utime(lock, (1, 1))
    assert deepspeed_ops.stale_locks(tmp_path, 60.0) == [lock]


def test_on_a_network_file_system_a_lock_is_stale_after_the_longest_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / deepspeed_ops.TORCH_LOCK_FILE
    lock.touch()
    monkeypatch.setattr(deepspeed_ops, "LOCAL_FILE_SYSTEMS", ())
    assert deepspeed_ops.stale_locks(tmp_path) == []
    os.utime(lock, (1, 1))
    assert deepspeed_ops.stale_locks(tmp_path) == [lock]


@pytest.mark.parametrize(
    ("size", "fused", "refused"),
    [
        (2**31 - 1, True, False),
        (2**31, True, False),  # whole chunks
        (2**31 + 1, True, True),
        (2**31 + 1, False, False),
        (2**32 + 2**16, True, False),
    ],
)
def test_a_tensor_that_torch_would_update_wrongly_is_refused(size: int, fused: bool, refused: bool) -> None:
    tensors = [SimpleNamespace(numel=lambda size=size: size) for size in (5, size)]
    optimizer = SimpleNamespace(param_groups=[{"params": tensors, "fused": fused}])
    if not refused:
        deepspeed_ops.refuse_overflow(optimizer)
        return
    with pytest.raises(RuntimeError, match=f"a rank has {size}: train with --zero_stage 3 or on more GPUs"):
        deepspeed_ops.refuse_overflow(optimizer)
