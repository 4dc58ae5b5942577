"""What the image says of itself, before anything of it runs."""

from docker.models.images import Image

from scripts.images.build import unpacked_size
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION
from scripts.matrix.load import Cell


def test_size_is_within_the_budget(image: Image, cell: Cell) -> None:
    """All layers, unpacked."""
    assert unpacked_size(image) / 1e6 <= cell.size_budget_mb


def test_user_is_not_root_and_is_a_number(image: Image) -> None:
    """Kubernetes cannot tell of a name that it is not root's."""
    assert image.attrs["Config"]["User"] == "1000"


def test_processes_have_an_init(image: Image) -> None:
    """tini forwards signals and reaps what Ray leaves."""
    assert image.attrs["Config"]["Entrypoint"][0].endswith("tini")


def test_labels_tell_cell_and_versions(image: Image, cell: Cell) -> None:
    """And what was not shown, so that nobody has to look it up."""
    labels = image.labels
    assert labels[f"{NAMESPACE}.cell"] == cell.id
    assert {name: labels[f"{NAMESPACE}.version.{name}"] for name in cell.versions} == cell.versions
    assert labels["org.opencontainers.image.version"] == f"{cell.release}-{cell.id}"
    assert labels[f"{NAMESPACE}.unverified"] == cell.tested.unverified
    assert labels[REVISION]
    assert labels[INPUTS]


def test_env_defaults_are_in_the_configuration(image: Image, cell: Cell) -> None:
    """So that `docker exec`, which starts no shell of ours, has them too."""
    env = image.attrs["Config"]["Env"]
    assert [f"{item.name}={item.value}" for item in cell.env if f"{item.name}={item.value}" not in env] == []
