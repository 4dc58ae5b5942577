"""rlhf_stack.cluster: the ray start for a machine, and who may join."""

import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf_stack.cluster import auth_token, host
from rlhf_stack.cluster.host import Here
from rlhf_stack.cluster.start_command import LEAST, Asked, command
from rlhf_stack.errors import UserError

GIB = 1 << 30
HERE = Here(seen=tuple("01234567"), memory=1000 * GIB, shared=100 * GIB, address="10.0.0.1")
HEAD, NODE = Asked(join=None), Asked(join="10.0.0.1")


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_head_declares_what_is_there_and_keeps_its_dashboard_to_itself() -> None:
    words = command(HEAD, HERE, token=True)
    assert words[:3] == ["ray", "start", "--node-ip-address"]
    assert "--head" in words
    assert value(words, "--num-gpus") == "8"
    assert value(words, "--dashboard-host") == "127.0.0.1"
    assert value(words, "--object-store-memory") == str(int(100 * GIB * 0.9))
    assert "--block" not in words


def test_a_node_joins_the_port_of_ray_unless_it_is_told_another() -> None:
    assert value(command(NODE, HERE, token=True), "--address") == "10.0.0.1:6379"
    assert value(command(replace(NODE, join="h:1"), HERE, token=True), "--address") == "h:1"
    assert "--dashboard-host" not in command(NODE, HERE, token=True)


@pytest.mark.parametrize("address", ["", "10.0.0.1:x", "a:b:1", "head:0", "head:65536", "fe80::1", "a head"])
def test_what_is_no_address_of_a_head_is_said_at_once(address: str) -> None:
    with pytest.raises(UserError, match="HOST or HOST:PORT"):
        command(replace(NODE, join=address), HERE, token=True)


def test_an_address_of_version_6_is_in_brackets() -> None:
    assert value(command(replace(NODE, join="[fe80::1]"), HERE, token=True), "--address") == "[fe80::1]:6379"


def test_gpus_that_are_not_seen_are_not_declared() -> None:
    two = replace(HERE, seen=("4", "5"))
    assert value(command(HEAD, two, token=True), "--num-gpus") == "2"
    with pytest.raises(UserError, match=r"--num-gpus 3.*sees 2 GPUs \(4, 5\).*CUDA_VISIBLE_DEVICES"):
        command(replace(HEAD, gpus=3), two, token=True)
    assert value(command(replace(HEAD, gpus=2), two, token=True), "--num-gpus") == "2"


def test_without_a_gpu_places_for_processes_can_be_declared() -> None:
    none = replace(HERE, seen=None)
    assert value(command(HEAD, none, token=True), "--num-gpus") == "0"
    assert value(command(replace(HEAD, gpus=2), none, token=True), "--num-gpus") == "2"


def test_the_object_store_fits_in_shared_memory_and_leaves_the_host_its_own() -> None:
    assert value(command(HEAD, replace(HERE, memory=10 * GIB), token=True), "--object-store-memory") == str(
        3 * GIB
    )
    with pytest.raises(UserError, match="--shm-size 2g"):
        command(HEAD, replace(HERE, shared=64 << 20), token=True)
    with pytest.raises(UserError, match=r"more than the .* bytes that are free"):
        command(replace(HEAD, object_store=200 * GIB), HERE, token=True)
    assert value(
        command(replace(HEAD, object_store=LEAST), HERE, token=True), "--object-store-memory"
    ) == str(LEAST)


@pytest.mark.parametrize(
    ("asked", "address"),
    [(HEAD, "8.8.8.8"), (NODE, "2001:4860:4860::8888"), (replace(HEAD, dashboard="8.8.4.4"), "10.0.0.1")],
)
def test_a_public_address_without_a_token_is_refused(asked: Asked, address: str) -> None:
    with pytest.raises(UserError, match="is a public address"):
        command(asked, replace(HERE, address=address), token=False)
    assert command(asked, replace(HERE, address=address), token=True)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", False), ("10.1.2.3", False), ("192.168.0.9", False), ("1.1.1.1", True), ("head", False)],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert host.is_public(address) == expected


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert not auth_token.is_here(environment)
    assert auth_token.ensure(environment)
    file = auth_token.path(environment)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    assert auth_token.is_here(environment)
    assert not auth_token.ensure(environment)


def test_a_token_of_the_user_is_used(tmp_path: Path) -> None:
    assert not auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN: "x"})
    other = tmp_path / "other"
    other.write_text("x")
    assert not auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN_PATH: str(other)})
    assert not (tmp_path / ".ray").exists()


def test_a_home_that_cannot_be_written_to_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file")
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH to a file"):
        auth_token.ensure({"HOME": str(tmp_path)})


def test_clients_use_a_token_where_ray_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"HOME": str(tmp_path), auth_token.TOKEN: "x"}
    monkeypatch.setattr(auth_token, "is_known", lambda: True)
    assert auth_token.use(environment) == {auth_token.MODE: "token"}
    assert auth_token.use({"HOME": str(tmp_path)}) == {}
    assert auth_token.use(environment | {auth_token.MODE: "disabled"}) == {}
    monkeypatch.setattr(auth_token, "is_known", lambda: False)
    assert auth_token.use(environment) == {}


def test_a_head_is_waited_for_and_missed_in_time() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no head answers at {address} after 0.3 s"):
            host.wait_for(address, 0.3)
        listening.listen()
        host.wait_for(address, 5)


def test_this_machine_has_memory_and_an_address() -> None:
    here = host.look({})
    assert here.memory > GIB / 4
    assert here.shared > 0
    assert here.address.count(".") == 3
