"""The image's size, configuration and labels, which Docker reports without running it."""

from docker.models.images import Image

from scripts.images.build import unpacked_size
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION
from scripts.matrix.load import Cell


def test_size_is_within_the_budget(image: Image, cell: Cell) -> None:
    """The budget covers all layers, unpacked."""
    assert unpacked_size(image) / 1e6 <= cell.size_budget_mb


def test_user_is_not_root_and_is_a_number(image: Image) -> None:
    """Kubernetes cannot verify that a user name is not root."""
    assert image.attrs["Config"]["User"] == "1000"


def test_without_a_command_it_is_a_shell(image: Image) -> None:
    assert image.attrs["Config"]["Cmd"] == ["bash"]


def test_processes_have_an_init(image: Image) -> None:
    """tini forwards signals and reaps orphans of Ray."""
    assert image.attrs["Config"]["Entrypoint"][0].endswith("tini")


def test_labels_name_cell_and_versions(image: Image, cell: Cell) -> None:
    """Labels name the cell, its versions and what is unverified."""
    labels = image.labels
    assert labels[f"{NAMESPACE}.cell"] == cell.id
    assert {name: labels[f"{NAMESPACE}.version.{name}"] for name in cell.versions} == cell.versions
    assert labels["org.opencontainers.image.version"] == f"{cell.release}-{cell.id}"
    assert labels[f"{NAMESPACE}.unverified"] == cell.tested.unverified
    assert labels[REVISION]
    assert f"RLHF_STACK_INPUTS={labels[INPUTS]}" in image.attrs["Config"]["Env"]


def test_env_defaults_are_in_the_configuration(image: Image, cell: Cell) -> None:
    """`docker exec`, which does not run our entrypoint, has them too."""
    env = image.attrs["Config"]["Env"]
    assert [f"{item.name}={item.value}" for item in cell.env if f"{item.name}={item.value}" not in env] == []
