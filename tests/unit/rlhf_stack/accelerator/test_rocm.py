"""AMD detection: ``rocm-smi`` may be absent, fail, hang or print anything without stopping Ray."""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from rlhf_stack.accelerator import rocm
from rlhf_stack.config import env_vars

TABLE = """

device,Device Name,Device ID,Device Rev,Subsystem ID,GUID
card0,AMD Instinct MI300X,0x74a1,0x00,0x74a1,1
card1,AMD Instinct MI300X,0x74a1,0x00,0x74a1,2
"""
AMD_SMI = """gpu,gpu_bdf,gpu_uuid
0,0000:0c:00.0,c0ff74a1-0000-1000-80b1-06985c515c91
1,0000:22:00.0,d1ff74a1-0000-1000-80f4-8f9f1d2b5a10
"""
WARNED = f"WARNING: AMD GPU device(s) is/are in a low-power state.\n{TABLE}\nWARNING: one or more, failed\n"


@pytest.fixture(autouse=True)
def rocm_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path where a test may create ``rocm-smi``; the PATH has nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rocm, "TOPOLOGY", tmp_path / "nodes")
    rocm.is_rocm.cache_clear()
    yield tmp_path / "rocm-smi"
    rocm.is_rocm.cache_clear()


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("listing", "found"),
    [(TABLE, 2), (WARNED, 2), ("", 0), ("ERROR: driver not initialized\nsee\nthe\nlog", 0), ("card0", 0)],
)
def test_only_cards_are_counted(rocm_smi: Path, listing: str, found: int) -> None:
    script(rocm_smi, f"printf '%s' '{listing}'")
    assert rocm.count() == found


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        (AMD_SMI, 2),
        (f"WARNING: group render is missing\n{AMD_SMI}", 2),
        ("gpu,gpu_bdf,gpu_uuid\n", 0),
        ("ERROR: 5, driver not initialized\n", 0),
        ("", 0),
    ],
)
def test_gpus_that_amd_smi_alone_lists_are_counted(rocm_smi: Path, listing: str, found: int) -> None:
    script(rocm_smi.with_name("amd-smi"), f"[ \"$*\" = 'list --csv' ] && printf '%s' '{listing}'")
    assert rocm.count() == found


@pytest.mark.parametrize(
    ("listing", "product"),
    [
        ('{"card0": {"GPU ID": "0x740f"}}', "0x740f"),
        ('{"card0": {"Device Name": "MI300X", "Device ID": "0x74a1"}}', "0x74a1"),
        ('WARNING: low power\n{"card0": {"Device ID": "0x74a1"}}\n', "0x74a1"),
        ('{"card0": {}}', None),
        ("[]", None),
        ("null", None),
        ("__import__('os').abort()", None),  # Ray 2.12.0 evaluates what it reads
        ("", None),
    ],
)
def test_product_is_parsed_and_never_evaluated(listing: str, product: str | None) -> None:
    assert rocm.parse_product(listing) == product


def test_without_rocm_smi_there_is_no_amd_gpu() -> None:
    assert rocm.count() == 0
    assert rocm.product() is None
    assert not rocm.is_rocm()


def test_rocm_smi_runs_once(rocm_smi: Path) -> None:
    script(rocm_smi, 'printf "%s\\n" device,Name card0,MI300X card1,MI300X')
    assert rocm.count() == 2
    assert rocm.is_rocm()
    rocm_smi.unlink()
    assert rocm.is_rocm()


def test_rocm_image_needs_no_rocm_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "rocm")
    assert rocm.is_rocm()


@pytest.mark.parametrize("body", ["echo card0,x >&2; exit 3", "kill -9 $$", "exec no-such-program"])
def test_failing_rocm_smi_finds_nothing(rocm_smi: Path, body: str) -> None:
    script(rocm_smi, body)
    assert rocm.count() == 0


def test_hanging_rocm_smi_is_abandoned(
    rocm_smi: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rocm, "SMI_SECONDS", 0.2)
    script(rocm_smi, f'exec {sys.executable} -c "import signal; signal.pause()"')
    assert rocm.count() == 0
    assert "rocm-smi does not answer" in caplog.text


def test_without_rocm_smi_gpus_are_counted_by_the_kernel(rocm_smi: Path) -> None:
    for node, text in enumerate(
        ("cpu_cores_count 64\nsimd_count 0\n", "simd_count 1216\n", "simd_count 880\n")
    ):
        folder = rocm_smi.parent / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(text, encoding="ascii")
    (rocm_smi.parent / "nodes" / "3" / "properties").mkdir(
        parents=True
    )  # as little readable as another's GPU
    assert rocm.count() == 2
    script(rocm_smi, "printf '%s\\n' card0,MI300X")
    assert rocm.count() == 1


def fake_ray(monkeypatch: pytest.MonkeyPatch, running: bool, connected: bool = False) -> MagicMock:
    ray = MagicMock()
    ray.is_initialized.return_value = connected
    ray.init.side_effect = None if running else [ConnectionError("no cluster"), None]
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_vllm_joins_a_running_cluster_without_naming_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, running=True)
    rocm.join_ray(None, 4)
    assert ray.init.mock_calls == [call(address="auto", ignore_reinit_error=True)]


def test_vllm_starts_a_cluster_with_its_gpus_if_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, running=False)
    rocm.join_ray(None, 4)
    assert ray.init.mock_calls[-1] == call(ignore_reinit_error=True, num_gpus=4)


def test_named_cluster_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, running=False)
    with pytest.raises(ConnectionError, match="no cluster"):
        rocm.join_ray("10.0.0.1:6379", 4)
    assert ray.init.mock_calls == [call(address="10.0.0.1:6379", ignore_reinit_error=True)]


def test_inside_a_ray_actor_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = fake_ray(monkeypatch, running=True, connected=True)
    rocm.join_ray(None, 4)
    ray.init.assert_not_called()


def test_the_driver_is_compared_by_its_version_or_that_of_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocm, "MODULE", tmp_path / "amdgpu")
    monkeypatch.setattr("platform.release", lambda: "6.8.0-31-generic")
    assert rocm.driver() == ""
    (tmp_path / "amdgpu").mkdir()
    assert rocm.driver() == "Linux 6.8.0-31-generic"
    (tmp_path / "amdgpu" / "version").write_text("6.12.12\n")
    assert rocm.driver() == "6.12.12"


def test_names_of_cards_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm, "CARDS", tmp_path)
    for card, name in (("card0", ""), ("card1", "AMD Instinct MI300X\n"), ("card1-DP-1", "a connector")):
        (tmp_path / card / "device").mkdir(parents=True)
        (tmp_path / card / "device" / "product_name").write_text(name)
    (tmp_path / "card1-DP-1" / "device" / "product_name").unlink()
    assert rocm.product_names() == ("AMD Instinct MI300X",)
