"""Each combination of the variables selects the GPU that Ray assigned, or is an error that names two.

The machine has 8 GPUs. `test_documented_rules` compares what a process sees with the runtimes' own rules.
"""

import itertools
import os
from collections.abc import Iterator

import pytest
from rlhf_stack.accelerator import rocm, visible_devices
from rlhf_stack.accelerator.visible_devices import CUDA, HIP, ROCR

GPUS = 8
ALL = "0 1 2 3 4 5 6 7"
NOSET_ROCR = "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"
SWITCHES = (None, "0", "1")
LISTS = (None, "4,5,6,7", "6,4", "1,0,3,2")
ENGINES = [(0,), (1,), (1, 0), (0, 1, 2, 3)]  # Ray's GPUs of an engine with TP 1, 1, 2 and 4, by rank


def environment(**variables: str | None) -> dict[str, str]:
    names = {"rocr": ROCR, "hip": HIP, "cuda": CUDA, "noset": visible_devices.NOSET, "noset_rocr": NOSET_ROCR}
    return {names[name]: value for name, value in variables.items() if value is not None}


@pytest.mark.parametrize(
    ("kind", "variables", "shown"),
    [
        ("rocm", {}, ALL),
        ("rocm", {"cuda": "4,5"}, "4 5"),
        ("rocm", {"hip": "5,4"}, "5 4"),
        ("rocm", {"hip": "1", "cuda": "4,5"}, "1"),  # HIP's own variable wins
        ("rocm", {"hip": "", "cuda": "4,5"}, "4 5"),  # empty counts as unset
        ("rocm", {"cuda": ""}, ALL),
        ("rocm", {"cuda": "-1"}, ""),
        ("rocm", {"rocr": "4,5"}, "4 5"),
        ("rocm", {"rocr": ""}, ""),  # but not in the layer below
        ("rocm", {"rocr": "7,5,3", "cuda": "2,0"}, "3 7"),  # renumbered from 0
        ("rocm", {"rocr": "5", "cuda": "4,5"}, ""),  # what Ray 2.12.0 leaves to a worker of vLLM 0.4.2
        ("rocm", {"cuda": "1,8,2"}, "1"),  # nothing after an entry that names no GPU
        ("rocm", {"cuda": "3,3,2"}, "3 2"),
        ("rocm", {"rocr": "GPU-1f,2", "hip": "1,0"}, "2 GPU-1f"),
        ("cuda", {"cuda": "5,4"}, "5 4"),
        ("cuda", {"cuda": ""}, ""),
        ("cuda", {"cuda": "NoDevFiles"}, ""),
        ("cuda", {"hip": "1", "rocr": "2"}, ALL),  # not CUDA's
        ("cuda", {"cuda": "GPU-1f,GPU-2a"}, "GPU-1f GPU-2a"),
    ],
)
def test_what_a_process_sees(kind: visible_devices.Kind, variables: dict[str, str], shown: str) -> None:
    assert visible_devices.visible_gpus(environment(**variables), kind, GPUS) == shown.split()


def test_rocr_reads_numbers_in_base_0() -> None:
    assert visible_devices.visible_gpus({ROCR: "010,9,0xB"}, "rocm", 16) == ["8", "9", "11"]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the process that Ray restricts."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


def amd_worker(node: dict[str, str], process: dict[str, str], slot: int) -> str:
    """Do what patched Ray does in a worker of ``node`` before user code runs; return the GPU's name."""
    process.clear()
    process.update(node)
    names = rocm.visible_ids()
    name = str(slot) if names is None else names[slot]
    rocm.restrict_process([name])
    return name


def rocm_nodes() -> Iterator[dict[str, str]]:
    for rocr, hip, cuda, noset, noset_rocr in itertools.product(LISTS, LISTS, LISTS, SWITCHES, SWITCHES):
        yield environment(rocr=rocr, hip=hip, cuda=cuda, noset=noset, noset_rocr=noset_rocr)


def usable(node: dict[str, str]) -> bool:
    """Report whether each entry of HIP's list names a GPU that ROCR admits."""
    below = len(node.get(ROCR, ALL.replace(" ", ",")).split(","))
    above = node.get(HIP, node.get(CUDA, "0"))
    return max(map(int, above.split(","))) < below


@pytest.mark.parametrize("node", [pytest.param(node, id=str(node)) for node in rocm_nodes() if usable(node)])
def test_rocm_processes_compute_on_the_assigned_gpu(node: dict[str, str], process: dict[str, str]) -> None:
    physical = visible_devices.visible_gpus(
        node, "rocm", GPUS
    )  # Ray's slots, in the order in which the node sees them
    assert len(visible_devices.node_ids(node) or ALL.split()) == len(physical)
    for slot, expected in enumerate(physical):
        name = amd_worker(node, process, slot)
        shown = visible_devices.visible_gpus(process, "rocm", GPUS)
        assert (
            shown[visible_devices.ordinal(name, process, "rocm")] == expected
        )  # a trainer rank, an engine with TP 1
        if node.get(visible_devices.NOSET) != "1":
            assert shown == [expected]  # a user's own actor, which takes the first GPU that it sees
    for slots in ENGINES:
        if max(slots) < len(physical):
            names = [amd_worker(node, process, slot) for slot in slots]
            process.update(visible_devices.environment_for(names, "rocm"))
            assert visible_devices.visible_gpus(process, "rocm", GPUS) == [physical[slot] for slot in slots]


@pytest.mark.parametrize(
    "node", [pytest.param(node, id=str(node)) for node in rocm_nodes() if not usable(node)]
)
def test_contradicting_lists_are_named(
    node: dict[str, str], process: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    above = HIP if HIP in node else CUDA
    both = f"{ROCR}={node[ROCR]} and {above}={node[above]} disagree"
    with pytest.raises(visible_devices.VisibleDevicesError, match=both):
        visible_devices.node_ids(node)
    with pytest.raises(visible_devices.VisibleDevicesError, match=both):
        visible_devices.ordinal("0", node, "rocm")
    process.update(node)
    assert rocm.visible_ids() == []
    assert both in caplog.text


@pytest.mark.parametrize(("noset", "cuda"), [*itertools.product(SWITCHES, (*LISTS, "GPU-1f,GPU-2a"))])
@pytest.mark.parametrize("zero_is_on", [False, True], ids=["Ray 2.55", "older Ray"])
def test_cuda_ranks_compute_on_the_assigned_gpu(
    noset: str | None, cuda: str | None, zero_is_on: bool
) -> None:
    node = environment(noset=noset, cuda=cuda)
    names = cuda.split(",") if cuda else ALL.split()
    unrestricted = noset == "1" or (zero_is_on and noset == "0")
    for name in names:
        worker = node if unrestricted else node | {CUDA: name}
        shown = visible_devices.visible_gpus(worker, "cuda", GPUS)
        assert shown[visible_devices.ordinal(name, worker, "cuda")] == name


@pytest.mark.parametrize(
    ("kind", "variables", "by", "assigned", "error"),
    [
        ("cuda", {"cuda": "4,5"}, CUDA, "6", "CUDA_VISIBLE_DEVICES=4,5 and GPU 6 of Ray disagree"),
        ("cuda", {}, CUDA, "GPU-1f", "GPU GPU-1f of Ray is not a number"),
        ("rocm", {"hip": "4,5", "cuda": "1"}, CUDA, "1", f"{HIP}=4,5 and {CUDA}=1 disagree"),
        ("rocm", {"hip": "4,5"}, CUDA, "0", f"{HIP}=4,5 and GPU 0 of Ray disagree"),
        ("rocm", {"rocr": "4,5"}, CUDA, "2", f"{ROCR}=4,5 and GPU 2 of Ray disagree"),
        ("rocm", {"rocr": "4,5"}, ROCR, "6", f"{ROCR}=4,5 and GPU 6 of Ray disagree"),
        ("rocm", {"rocr": "5", "cuda": "4,5"}, ROCR, "5", f"{ROCR}=5 and {CUDA}=4,5 disagree"),
    ],
)
def test_contradiction_is_an_error_that_names_two(
    kind: visible_devices.Kind, variables: dict[str, str], by: str, assigned: str, error: str
) -> None:
    with pytest.raises(visible_devices.VisibleDevicesError, match=error):
        visible_devices.ordinal(assigned, environment(**variables), kind, by)


@pytest.mark.parametrize(
    ("variables", "assigned", "shown"),
    [
        ({"rocr": "5"}, "5", "5"),  # Ray restricted the process
        ({"rocr": "7,5"}, "5", "5"),  # a NOSET variable is set, on a restricted node
        ({"rocr": "7,5", "hip": "1,0"}, "7", "7"),
        ({}, "5", "5"),  # a NOSET variable is set
    ],
)
def test_released_ray_that_names_gpus_by_rocr_is_supported(
    variables: dict[str, str], assigned: str, shown: str
) -> None:
    worker = environment(**variables)
    rank = visible_devices.ordinal(assigned, worker, "rocm", ROCR)
    assert visible_devices.visible_gpus(worker, "rocm", GPUS)[rank] == shown


@pytest.mark.parametrize("variables", [{"cuda": ""}, {"hip": ""}, {"cuda": "-1"}, {"rocr": ""}])
def test_node_that_hides_its_gpus_assigns_none(variables: dict[str, str]) -> None:
    assert visible_devices.node_ids(environment(**variables)) == []


def test_actor_without_a_gpu_sees_none(process: dict[str, str]) -> None:
    process.update(environment(hip="4,5"))
    rocm.restrict_process([])
    assert visible_devices.visible_gpus(process, "rocm", GPUS) == []
