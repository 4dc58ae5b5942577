"""The Docker Engine that the user chose, by ``DOCKER_HOST`` or by a context, is the one that is used."""

import functools
import hashlib
import json
import os
from pathlib import Path

import pytest

from scripts.docker import bootstrap, client, endpoint
from scripts.errors import UserError


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Docker's configuration with the context ``down``, whose Engine does not answer."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    create("down", f"unix://{tmp_path}/down.sock", tmp_path)
    return tmp_path


def create(context: str, address: str, configuration: Path) -> None:
    """As ``docker context create`` writes it; the SDK writes other addresses."""
    file = configuration / "contexts" / "meta" / hashlib.sha256(context.encode()).hexdigest() / "meta.json"
    file.parent.mkdir(parents=True)
    endpoints = {"docker": {"Host": address, "SkipTLSVerify": False}}
    file.write_text(json.dumps({"Name": context, "Metadata": {}, "Endpoints": endpoints}), encoding="utf-8")


def use(context: str, configuration: Path) -> None:
    (configuration / "config.json").write_text(json.dumps({"currentContext": context}), encoding="utf-8")


def test_the_default_of_this_machine_is_no_choice(contexts: Path) -> None:
    assert endpoint.chosen(os.environ) is None
    use("default", contexts)
    assert endpoint.chosen(os.environ) is None
    assert endpoint.chosen({"DOCKER_CONTEXT": "default"}) is None


def test_the_variables_come_before_the_current_context(contexts: Path) -> None:
    use("absent", contexts)
    by_context = endpoint.chosen({"DOCKER_CONTEXT": "down"})
    assert by_context is not None
    assert by_context.address == f"unix://{contexts}/down.sock"
    by_host = endpoint.chosen({"DOCKER_CONTEXT": "down", "DOCKER_HOST": "tcp://h:1"})
    assert by_host is not None
    assert by_host.address == "tcp://h:1"


def test_a_context_that_is_down_is_an_error_and_nothing_is_started(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("down", contexts)
    monkeypatch.setattr(bootstrap, "start", lambda: pytest.fail("started this machine's Docker"))
    monkeypatch.setattr(bootstrap, "install", lambda _: pytest.fail("installed Docker"))
    expected = "no Docker Engine answers at Docker's context 'down' .*`docker context use default` to use"
    for connect in (client.connect, functools.partial(bootstrap.ensure, is_root=True)):
        with pytest.raises(UserError, match=expected):
            connect()


def test_a_context_that_does_not_exist_is_an_error(contexts: Path) -> None:
    use("absent", contexts)
    with pytest.raises(UserError, match=r"'absent' does not exist: .*, or `docker context use default`"):
        client.connect()
    with pytest.raises(UserError, match=r"'other' does not exist: .*, or `unset DOCKER_CONTEXT`"):
        endpoint.chosen({"DOCKER_CONTEXT": "other"})


def test_a_context_whose_file_is_damaged_is_an_error(contexts: Path) -> None:
    use("down", contexts)
    (meta,) = contexts.glob("contexts/meta/*/meta.json")
    meta.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"^Docker's context 'down' cannot be read \(.*\): correct it, or"):
        client.connect()


def test_the_space_of_another_machine_is_not_that_of_this_one(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in which a remote Engine stores its images may exist here too."""

    class Client:
        def info(self) -> dict[str, object]:
            return {"DockerRootDir": str(contexts)}

    monkeypatch.setattr(client, "connect", Client)
    create("remote", "tcp://10.0.0.9:2376", contexts)
    use("remote", contexts)
    client.need_space(10**12)
    use("down", contexts)
    with pytest.raises(UserError, match="no space left"):
        client.need_space(10**12)
