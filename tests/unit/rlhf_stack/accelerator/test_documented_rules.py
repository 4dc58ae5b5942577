"""What a process sees, and the GPU that a rank takes, by the runtimes' own rules instead of this project's.

`ROWS` are rules with their source; `rocr`, `hip` and `cuda` state the same rules for any list, and `RAYS`
what each release of Ray does to a worker. Nothing ran on a GPU: the sources were read on 2026-11-24.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlhf_stack.accelerator import visible_devices
from rlhf_stack.accelerator.visible_devices import CUDA, HIP, ROCR, VisibleDevicesError

Environment = dict[str, str]

NOSET_ROCR = "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"
NOSET_HIP = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"
GPUS = list(range(8))
UUID = [f"GPU-{number:x}b2c1a9f8d3e6f7a" for number in GPUS]

ROCR_SOURCE = "ROCR-Runtime, core/runtime/amd_filter_device.cpp: RvdFilter"
ROCR_PAGE = "AMD, GPU isolation techniques (6.1.2 and 7.14): ROCR_VISIBLE_DEVICES, indices or UUIDs"
HIP_SOURCE = "ROCm/clr, rocclr/device/rocm/rocdevice.cpp: Device::init (6.1 and amd-staging)"
HIP_UUIDS = "ROCm/clr, CHANGELOG.md: HIP 6.2 adds UUIDs"
HIP_PAGE = "AMD, HIP environment variables (6.4 and 7.1): device indices exposed to HIP applications"
CUDA_PAGE = "NVIDIA, CUDA programming guide, 5.2.1.1 CUDA_VISIBLE_DEVICES"
TORCH = "torch/cuda/__init__.py of 2.13.0, _parse_visible_devices: what torch counts by"

# runtime, value, GPUs that it shows, source
ROWS: list[tuple[str, str, list[int], str]] = [
    ("rocr", "0,2", [0, 2], ROCR_PAGE),
    ("rocr", f"0,{UUID[3]}", [0, 3], ROCR_PAGE),
    ("rocr", "", [], ROCR_SOURCE),
    ("rocr", "5, 3", [5, 3], ROCR_SOURCE),
    ("rocr", "1,1,2", [1], ROCR_SOURCE),
    ("rocr", f"2,{UUID[2]},3", [2], ROCR_SOURCE),
    ("rocr", "1,8,2", [1], ROCR_SOURCE),
    ("rocr", "1,-1,2", [1], ROCR_SOURCE),
    ("rocr", "1,two,3", [1], ROCR_SOURCE),
    ("rocr", "0x2,03", [2, 3], ROCR_SOURCE),
    ("rocr", UUID[4].lower(), [4], ROCR_SOURCE),
    ("rocr", UUID[4][:6], [4], ROCR_SOURCE),
    ("rocr", "GPU-", [], ROCR_SOURCE),
    ("hip 6.1", "0,2", [0, 2], HIP_PAGE),
    ("hip 6.1", "2,0", [2, 0], HIP_SOURCE),
    ("hip 6.1", "4, 5", [4], HIP_SOURCE),
    ("hip 6.1", "04", [], HIP_SOURCE),
    ("hip 6.1", "3,3,2", [3, 2], HIP_SOURCE),
    ("hip 6.1", "1,8,2", [1], HIP_SOURCE),
    ("hip 6.1", "-1", [], HIP_SOURCE),
    ("hip 6.1", "NoDevFiles", [], HIP_SOURCE),
    ("hip 6.1", "4,5,", [4, 5], HIP_SOURCE),
    ("hip 6.1", "4,,5", [4], HIP_SOURCE),
    ("hip 6.1", UUID[4], [], HIP_UUIDS),
    ("hip 6.2", UUID[4], [4], HIP_UUIDS),
    ("hip 6.2", f"1,{UUID[4]}", [1, 4], HIP_SOURCE),
    ("cuda", "2,1", [2, 1], CUDA_PAGE),
    ("cuda", "0,2,-1,1", [0, 2], CUDA_PAGE),
    ("cuda", "", [], CUDA_PAGE),
    ("cuda", UUID[3], [3], CUDA_PAGE),
    ("cuda", UUID[3][:8], [3], CUDA_PAGE),
    ("cuda", "5, 3", [5, 3], TORCH),
    ("cuda", "3,3,2", [], TORCH),
    ("cuda", "1gpu2,2ampere", [1, 2], TORCH),
    ("cuda", f"{UUID[3]},1", [3], TORCH),
    ("cuda", f"1,{UUID[3]}", [1], TORCH),
    ("cuda", "NoDevFiles", [], TORCH),
]


def rocr(value: str) -> list[int]:
    shown: list[int] = []
    for token in map(str.strip, value.upper().split(",") if value else []):
        if token.startswith("G"):
            matches = [gpu for gpu in GPUS if 5 <= len(token) <= 20 and UUID[gpu].upper().startswith(token)]
            gpu = matches[0] if len(matches) == 1 else -1
        elif re.fullmatch(r"\+?0X[0-9A-F]+", token):
            gpu = int(token, 16)
        elif re.fullmatch(r"\+?0[0-7]*", token):
            gpu = int(token, 8)
        else:
            gpu = int(token) if re.fullmatch(r"\+?[1-9][0-9]*", token) else -1
        if gpu not in GPUS or gpu in shown:
            break
        shown.append(gpu)
    return shown


def hip(value: str, agents: Sequence[int], uuids: bool) -> list[int]:
    if not value:
        return list(agents)
    shown: list[int] = []
    for token in value[:-1].split(",") if value.endswith(",") else value.split(","):
        by_uuid = [agent for agent in agents if uuids and "GPU-" in token and token in UUID[agent]]
        if by_uuid:
            agent = by_uuid[0]
        elif token in map(str, range(len(agents))):
            agent = agents[int(token)]
        else:
            break
        if agent not in shown:
            shown.append(agent)
    return shown


def cuda(value: str) -> list[int]:
    shown: list[int] = []
    for token in value.split(","):
        if value.startswith("GPU-"):
            gpu = next((gpu for gpu in GPUS if token.startswith("GPU-") and UUID[gpu].startswith(token)), -1)
        else:
            number = re.match(r"\+?([0-9]+)", token.strip())
            gpu = int(number[1]) if number else -1
        if gpu in shown:
            return []
        if gpu < 0:
            break
        shown.append(gpu)
    return list(itertools.takewhile(lambda gpu: gpu in GPUS, shown))


def runtime(environment: Environment, platform: str) -> list[int]:
    """Return the GPUs that a process sees on ``platform``: "cuda", "hip 6.1" or "hip 6.2"."""
    if platform == "cuda":
        return cuda(environment[CUDA]) if CUDA in environment else GPUS
    agents = rocr(environment[ROCR]) if ROCR in environment else GPUS
    return hip(environment.get(HIP) or environment.get(CUDA, ""), agents, platform == "hip 6.2")


@pytest.mark.parametrize(("name", "value", "shown", "source"), ROWS)
def test_the_rules_for_any_list_agree_with_each_row(
    name: str, value: str, shown: list[int], source: str
) -> None:
    rules: dict[str, Callable[[str], list[int]]] = {
        "rocr": rocr,
        "hip 6.1": lambda text: hip(text, GPUS, uuids=False),
        "hip 6.2": lambda text: hip(text, GPUS, uuids=True),
        "cuda": cuda,
    }
    assert rules[name](value) == shown, source


class RayRefuses(Exception):
    """Ray itself raises: no process starts on this node."""


def by_cuda(_: Environment) -> str:
    return CUDA


def by_rocr(_: Environment) -> str:
    return ROCR


def by_hip(environment: Environment) -> str:
    if HIP not in environment and ROCR in environment:
        raise RayRefuses
    if HIP in environment and environment.get(CUDA, environment[HIP]) != environment[HIP]:
        raise RayRefuses
    return CUDA if HIP not in environment and CUDA in environment else HIP


@dataclass(frozen=True)
class Ray:
    """A release of Ray: the variable by which it names GPUs, and the switch that keeps it from setting it.

    Patched, it asks this project for the names, and for the variables of a worker.
    """

    platform: str
    variable: Callable[[Environment], str]
    noset: str = visible_devices.NOSET
    patched: bool = False
    zero_is_on: bool = True

    def names(self, environment: Environment) -> list[str]:
        if self.patched:
            listed = visible_devices.node_ids(environment)
        else:
            value = environment.get(self.variable(environment))
            listed = None if value is None else [] if value in ("", "NoDevFiles") else value.split(",")
        return (
            [str(slot) for slot in range(len(runtime(environment, self.platform)))]
            if listed is None
            else listed
        )

    def worker(self, node: Environment, name: str) -> Environment:
        if self.patched:
            off = visible_devices.noset_enabled(node)
            return node if off else node | visible_devices.environment_for([name], "rocm")
        unset = ("", "0") if not self.zero_is_on else ("",)
        return node | {self.variable(node): name} if node.get(self.noset, "") in unset else node


# ray/_private/accelerators/ of each release; on ROCm 2.9.3 has no manager of AMD's GPUs.
RAYS = {
    "Ray 2.9.3 and 2.12.0, patched, ROCm 6.1": Ray("hip 6.1", by_cuda, patched=True),
    "Ray 2.9.3, released, ROCm 6.1": Ray("hip 6.1", by_cuda),
    "Ray 2.12.0, released, ROCm 6.1": Ray("hip 6.1", by_rocr, NOSET_ROCR),
    "Ray 2.55.0, ROCm 7": Ray("hip 6.2", by_hip, NOSET_HIP, zero_is_on=False),
    "Ray 2.55.0, ROCm 7 without its SMI library": Ray("hip 6.2", by_cuda, zero_is_on=False),
    "Ray 2.9.3 and 2.12.0, CUDA": Ray("cuda", by_cuda),
    "Ray 2.55.0, CUDA": Ray("cuda", by_cuda, zero_is_on=False),
}


def taken(ray: Ray, node: Environment) -> Iterator[tuple[int | None, int | None]]:
    """Yield each GPU that Ray may assign, and the one that a rank with it takes; None for none."""
    kind: visible_devices.Kind = "cuda" if ray.platform == "cuda" else "rocm"
    for name in ray.names(node):
        variable = ray.variable(node)
        worker = ray.worker(node, name)
        below = {ROCR: node[ROCR]} if ROCR in node and kind == "rocm" else {}
        meant = runtime(below | {variable: name}, ray.platform) if name else []
        shown = runtime(worker, ray.platform)
        ordinal = visible_devices.ordinal(name, worker, kind, variable)
        yield meant[0] if meant else None, shown[ordinal] if ordinal < len(shown) else None


def node_of(*values: str | None) -> Environment:
    names = (ROCR, HIP, CUDA, visible_devices.NOSET, NOSET_ROCR, NOSET_HIP)
    return {name: value for name, value in zip(names, values, strict=False) if value is not None}


VALID = (None, "4,5,6,7", "6,4", "0", "1,0,3,2")
MALFORMED = ("", "-1", "NoDevFiles", "4, 5", "5,9", "3,3,2", "0,-1,1", "01,2", "two", "1,,2")
ANY = (*VALID, *MALFORMED, UUID[5], f"{UUID[2]},1")
SWITCHES = (None, "0", "1")


@pytest.mark.parametrize("ray", RAYS.values(), ids=list(RAYS))
def test_no_combination_takes_another_gpu_than_ray_assigned(ray: Ray) -> None:
    outcomes: Counter[str] = Counter()
    for values in itertools.product(ANY, ANY, ANY, SWITCHES):
        node = node_of(*values[:3]) | ({ray.noset: values[3]} if values[3] is not None else {})
        assigned: list[int | None] = []
        try:
            for meant, gpu in taken(ray, node):
                assert gpu in (meant, None), f"{node}: Ray assigned GPU {meant}, and the rank takes GPU {gpu}"
                outcomes["right" if gpu is not None else "none"] += 1
                assert meant not in assigned or not ray.patched, f"{node}: Ray assigns GPU {meant} twice"
                assigned.append(meant)
        except (VisibleDevicesError, RayRefuses) as refusal:
            outcomes[type(refusal).__name__] += 1
    assert outcomes["right"] > 400, outcomes


@pytest.mark.parametrize("ray", RAYS.values(), ids=list(RAYS))
@pytest.mark.parametrize("value", VALID)
@pytest.mark.parametrize("noset", SWITCHES)
def test_a_valid_list_in_one_variable_gives_each_rank_its_gpu(
    ray: Ray, value: str | None, noset: str | None
) -> None:
    listed = GPUS if value is None else [*map(int, value.split(","))]
    variables = {CUDA, HIP, ray.variable({}), *([ROCR] if ray.patched else [])}
    for variable in {CUDA} if ray.platform == "cuda" else variables:
        node = {name: text for name, text in ((variable, value), (ray.noset, noset)) if text is not None}
        if variable == ray.variable(node) or ray.patched:
            assert list(taken(ray, node)) == [(gpu, gpu) for gpu in listed]


NUMBERS = [str(gpu) for gpu in GPUS]
ENTRIES = [
    *NUMBERS,
    "-1",
    "8",
    "",
    " 2",
    "01",
    "0x3",
    "+1",
    "08",
    "two",
    "1x",
    "NoDevFiles",
    UUID[4],
    UUID[6],
]
LISTS = st.none() | st.lists(st.sampled_from(ENTRIES), max_size=6).map(",".join)


def by_number(shown: Iterable[str]) -> list[int]:
    return [UUID.index(gpu) if gpu in UUID else int(gpu) for gpu in shown]


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(["cuda", "hip 6.1", "hip 6.2"]), LISTS, LISTS, LISTS)
def test_what_a_process_sees_is_what_the_runtime_shows(
    platform: str, below: str | None, own: str | None, shared: str | None
) -> None:
    node = node_of(below, own, shared)
    kind: visible_devices.Kind = "cuda" if platform == "cuda" else "rocm"
    above = own or shared or ""
    assume(not ("GPU-" in above and below is not None and kind == "rocm"))  # which one ROCR admits is unknown
    assume(not ("GPU-" in above and platform == "hip 6.1"))  # invalid there, which the library ignores
    for listed in (set((value or "").split(",")) for value in (below, own, shared)):
        # A number and a UUID of the same GPU: unknown without a driver.
        assume(not any({uuid, str(gpu)} <= listed for gpu, uuid in enumerate(UUID)))
    shown = by_number(visible_devices.visible_gpus(node, kind, len(GPUS)))
    assert shown == runtime(node, platform)


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(list(RAYS.values())), LISTS, LISTS, LISTS, st.sampled_from(SWITCHES))
def test_no_list_takes_another_gpu_than_ray_assigned(
    ray: Ray, below: str | None, own: str | None, shared: str | None, noset: str | None
) -> None:
    node = node_of(below, own, shared) | ({} if noset is None else {ray.noset: noset})
    with contextlib.suppress(VisibleDevicesError, RayRefuses):
        for meant, gpu in taken(ray, node):
            assert gpu in (meant, None), f"{node}: Ray assigned GPU {meant}, and the rank takes GPU {gpu}"
