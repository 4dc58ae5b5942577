"""The ``ray start`` command of a machine, the cluster's token, and host inspection."""

import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from rlhf_stack.cluster import auth_token, host
from rlhf_stack.cluster.host import Host
from rlhf_stack.cluster.start_command import MIN_OBJECT_STORE, StartOptions, ray_start_command
from rlhf_stack.errors import UserError

GIB = 1 << 30
HERE = Host(visible_gpus=tuple("01234567"), memory=1000 * GIB, free_shm=100 * GIB, address="10.0.0.1")
GOOD = "0123456789abcdef" * 4
HEAD, NODE = StartOptions(join=None), StartOptions(join="10.0.0.1")


def value(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_head_declares_visible_gpus_and_binds_its_dashboard_to_loopback() -> None:
    words = ray_start_command(HEAD, HERE, token=True)
    assert words[:3] == ["ray", "start", "--node-ip-address"]
    assert "--head" in words
    assert value(words, "--num-gpus") == "8"
    assert value(words, "--dashboard-host") == "127.0.0.1"
    assert value(words, "--include-dashboard") == "true", "without it Ray starts without a job server"
    assert value(words, "--object-store-memory") == str(int(100 * GIB * 0.9))
    assert "--block" not in words


def test_node_joins_rays_default_port_unless_another_is_given() -> None:
    assert value(ray_start_command(NODE, HERE, token=True), "--address") == "10.0.0.1:6379"
    assert value(ray_start_command(replace(NODE, join="h:1"), HERE, token=True), "--address") == "h:1"
    assert "dashboard" not in " ".join(ray_start_command(NODE, HERE, token=True)), "Ray refuses it"


@pytest.mark.parametrize(
    "address",
    [
        *("", "10.0.0.1:x", "a:b:1", "head:0", "head:65536", "a head", "[red]", "h\n", "h:\u0661"),
        *("999.1.1.1", "999.1.1.1:6379", "10.0.0.01", "1234", "10.0.0"),
    ],
)
def test_malformed_head_address_is_an_error(address: str) -> None:
    with pytest.raises(UserError, match="HOST or HOST:PORT"):
        ray_start_command(replace(NODE, join=address), HERE, token=True)


@pytest.mark.parametrize(
    "address",
    ["[::]:6379", "::", "224.0.0.1:6379", "fe80::1%eth0", "::ffff:10.0.0.1", "fe80::1", "[fe80::1]:6379"],
)
def test_a_head_that_no_machine_can_be_is_an_error(address: str) -> None:
    with pytest.raises(UserError, match=r"no machine has this address|which Ray does not support"):
        ray_start_command(replace(NODE, join=address), HERE, token=True)


@pytest.mark.parametrize("address", ["[fd00::1]", "fd00::1", "[fd00::1]:6379"])
def test_ipv6_address_is_in_brackets(address: str) -> None:
    words = ray_start_command(replace(NODE, join=address), HERE, token=True)
    assert value(words, "--address") == "[fd00::1]:6379"
    assert host.endpoint("fd00::1", 80) == "[fd00::1]:80"


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])  # noqa: S104
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "localhost"])  # noqa: S104
def test_a_port_on_which_another_server_listens_is_an_error(listening: str, address: str) -> None:
    with socket.create_server((listening, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of {address}, .* is in use, probably by another"):
            host.require_free_port(address, port)
    host.require_free_port(address, port)


def test_an_address_that_cannot_be_bound_is_left_to_ray() -> None:
    host.require_free_port("192.0.2.1", host.free_port("127.0.0.1"))
    host.require_free_port("no-such-host.invalid", host.free_port("127.0.0.1"))


@pytest.mark.parametrize("address", ["fd00:0:0:0:0:0:0:1", "fd00::1:9abc", "[fd00::1:6379]"])
def test_ipv6_address_without_a_port_gets_rays(address: str) -> None:
    words = ray_start_command(replace(NODE, join=address), HERE, token=True)
    assert value(words, "--address") == f"[{address.strip('[]')}]:6379"


def test_ipv6_address_that_may_have_a_port_needs_brackets() -> None:
    """Its last part was taken for a part of the address."""
    expected = r"expected \[fd00::1\]:6379 with a port, or \[fd00::1:6379\] without"
    with pytest.raises(UserError, match=expected):
        ray_start_command(replace(NODE, join="fd00::1:6379"), HERE, token=True)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "::",
        "224.0.0.1",
        "10.0.0",
        "10.0.0.256",
        "a b",
        "[/red]",
        "h" * 300,
        "fe80::1%eth0",
        "fe80::1",
        "::ffff:1.2.3.4",
    ],
)
def test_bad_address_of_a_node_is_an_error(address: str) -> None:
    with pytest.raises(
        UserError, match=r"--node-ip-address .*: (expected an IP|no machine has|.* Ray does not)"
    ):
        ray_start_command(replace(HEAD, address=address), HERE, token=True)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "node-1.cluster.local"])
def test_address_of_a_node_is_declared(address: str) -> None:
    words = ray_start_command(replace(HEAD, address=address), HERE, token=True)
    assert value(words, "--node-ip-address") == address


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ("x" * 31, "has 31 characters"),
        ("x" * 20 + "\n" + "y" * 20, "white space"),
        ("ü" * 40, "white space or other characters"),
        ("\ufeff" + GOOD, "white space or other characters"),
    ],
)
def test_unusable_token_is_an_error(tmp_path: Path, token: str, problem: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    for environment in ({auth_token.TOKEN: token}, {auth_token.TOKEN_PATH: str(file)}):
        with pytest.raises(UserError, match=problem) as raised:
            auth_token.ensure({"HOME": str(tmp_path), **environment})
        assert "openssl rand -hex 32" in str(raised.value)


def test_token_that_is_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a file"):
        auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN_PATH: str(tmp_path)})


def test_token_may_end_with_a_line_break(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(GOOD + "\n")
    assert not auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN_PATH: str(file)})


def test_only_visible_gpus_are_declared() -> None:
    two = replace(HERE, visible_gpus=("4", "5"))
    assert value(ray_start_command(HEAD, two, token=True), "--num-gpus") == "2"
    with pytest.raises(UserError, match=r"--num-gpus 3.*sees 2 GPUs \(4, 5\).*CUDA_VISIBLE_DEVICES"):
        ray_start_command(replace(HEAD, gpus=3), two, token=True)
    assert value(ray_start_command(replace(HEAD, gpus=2), two, token=True), "--num-gpus") == "2"


def test_without_a_driver_any_number_of_gpus_can_be_declared() -> None:
    none = replace(HERE, visible_gpus=None)
    assert value(ray_start_command(HEAD, none, token=True), "--num-gpus") == "0"
    assert value(ray_start_command(replace(HEAD, gpus=2), none, token=True), "--num-gpus") == "2"


def test_object_store_fits_in_shared_memory_and_in_memory() -> None:
    assert value(
        ray_start_command(HEAD, replace(HERE, memory=10 * GIB), token=True), "--object-store-memory"
    ) == str(3 * GIB)
    with pytest.raises(UserError, match="--shm-size 2g"):
        ray_start_command(HEAD, replace(HERE, free_shm=64 << 20), token=True)
    with pytest.raises(UserError, match=r"more than the .* bytes that are free"):
        ray_start_command(replace(HEAD, object_store=200 * GIB), HERE, token=True)
    assert value(
        ray_start_command(replace(HEAD, object_store=MIN_OBJECT_STORE), HERE, token=True),
        "--object-store-memory",
    ) == str(MIN_OBJECT_STORE)


@pytest.mark.parametrize(
    ("options", "address"),
    [(HEAD, "8.8.8.8"), (NODE, "2001:4860:4860::8888"), (replace(HEAD, dashboard="8.8.4.4"), "10.0.0.1")],
)
def test_a_public_address_without_a_token_is_refused(options: StartOptions, address: str) -> None:
    with pytest.raises(UserError, match="is a public address"):
        ray_start_command(options, replace(HERE, address=address), token=False)
    assert ray_start_command(options, replace(HERE, address=address), token=True)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", False), ("10.1.2.3", False), ("192.168.0.9", False), ("1.1.1.1", True), ("head", False)],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert host.is_public(address) == expected


def test_token_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert not auth_token.is_available(environment)
    assert auth_token.ensure(environment)
    file = auth_token.path(environment)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    assert auth_token.is_available(environment)
    assert not auth_token.ensure(environment)


def test_existing_token_is_used(tmp_path: Path) -> None:
    assert not auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN: GOOD})
    other = tmp_path / "other"
    other.write_text(GOOD)
    assert not auth_token.ensure({"HOME": str(tmp_path), auth_token.TOKEN_PATH: str(other)})
    assert not (tmp_path / ".ray").exists()


def test_unwritable_home_is_an_error_with_remedy(tmp_path: Path) -> None:
    (tmp_path / ".ray").write_text("a file")
    with pytest.raises(UserError, match="RAY_AUTH_TOKEN_PATH to a file"):
        auth_token.ensure({"HOME": str(tmp_path)})


def test_clients_use_a_token_if_ray_supports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"HOME": str(tmp_path), auth_token.TOKEN: GOOD}
    monkeypatch.setattr(auth_token, "is_supported", lambda: True)
    assert auth_token.client_environment(environment) == {auth_token.MODE: "token"}
    assert auth_token.client_environment({"HOME": str(tmp_path)}) == {}
    assert auth_token.client_environment(environment | {auth_token.MODE: "disabled"}) == {}
    monkeypatch.setattr(auth_token, "is_supported", lambda: False)
    assert auth_token.client_environment(environment) == {}


def test_waiting_for_a_port_ends_at_the_deadline() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no head answers at {address} after 0.3 s"):
            host.wait_for_port(address, 0.3)
        listening.listen()
        host.wait_for_port(address, 5)


def test_the_address_of_a_node_is_on_the_route_to_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.own_address("127.0.0.1") == host.own_address("[127.0.0.1]") == "127.0.0.1"
    monkeypatch.setattr(host, "PROBE_ADDRESSES", {})  # a machine without a default route
    monkeypatch.setattr(socket, "gethostname", lambda: "10.1.2.3")
    assert host.own_address() == "10.1.2.3"
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    assert host.own_address() == "127.0.0.1"
    monkeypatch.setattr(
        host, "_addresses", lambda name: [] if name == "head" else [(socket.AF_INET, "127.0.1.1")]
    )
    with pytest.raises(UserError, match="no address of this machine leads to head: give --node-ip-address"):
        host.own_address("head")


def test_a_heads_name_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may have its name only when its head runs."""
    answers: list[list[object]] = [[], [], [(socket.AF_INET, "10.0.0.1")]]
    monkeypatch.setattr(host, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(host, "_addresses", lambda _: answers.pop(0))
    host.wait_for_name("head", 60)
    assert answers == []
    answers.append([])
    with pytest.raises(UserError, match=r"the head's name 'head' has no address$"):
        host.wait_for_name("head", 0)


@pytest.mark.parametrize(
    ("version", "statistics", "left"),
    [
        (0, "inactive_file 1\ntotal_inactive_file 300\n", 500),
        (1, "anon 4\ninactive_file 300\n", 500),
        (1, "anon 4\n", 200),
        (1, None, 200),
        (1, "inactive_file 900\n", 1000),
    ],
)
def test_the_inactive_file_cache_of_a_container_is_available(
    version: int, statistics: str | None, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a model was loaded no memory seemed left, and changed elements were never sent alone."""
    for name in ("CGROUP_LIMITS", "CGROUP_USES", "CGROUP_CACHES"):
        found = getattr(host, name)[version]
        path, key = found if isinstance(found, tuple) else (found, None)
        mine = tmp_path / path.name
        monkeypatch.setattr(host, name, ((mine, key) if key else mine,))
    (tmp_path / host.CGROUP_LIMITS[0].name).write_text("1000\n")
    (tmp_path / host.CGROUP_USES[0].name).write_text("800\n")
    if statistics is not None:
        (tmp_path / "memory.stat").write_text(statistics)
    assert host.available_memory() == left


def test_host_has_memory_and_an_address() -> None:
    found = host.inspect_host({})
    assert found.memory > GIB / 4
    assert found.free_shm > 0
    assert found.address.count(".") == 3
