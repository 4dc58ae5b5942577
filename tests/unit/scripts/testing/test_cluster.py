"""How containers are started as nodes, and which containers count as orphans."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from unittest.mock import MagicMock, create_autospec

import docker
import pytest

from scripts.errors import UserError
from scripts.testing import cluster
from scripts.testing.cluster import Cluster, ContainerNode, is_orphan, owner_label, ray_start, remove_on_exit


def test_head_and_worker_are_started_as_on_two_machines() -> None:
    """The worker has only the head's name."""
    head = ray_start(ContainerNode("head", gpus=2), None)
    worker = ray_start(ContainerNode("worker", gpus=2), "head")
    assert "--head" in head
    assert "--address=head:6379" in worker
    assert "--head" not in worker
    for command in (head, worker):
        assert "--num-gpus=2" in command
        assert any(word.startswith("--object-store-memory=") for word in command)


def test_a_container_of_a_running_process_is_no_orphan() -> None:
    assert not is_orphan(owner_label())


def test_a_container_of_an_ended_process_is_an_orphan() -> None:
    """Also when its id was reused by another process."""
    code = "from scripts.testing.cluster import owner_label; print(owner_label())"
    label = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert is_orphan(label)
    boot, namespace, _, _ = owner_label().split(":")
    assert is_orphan(f"{boot}:{namespace}:{os.getpid()}:1")


def test_a_container_of_another_machine_is_no_orphan() -> None:
    """Docker may serve several machines."""
    assert not is_orphan("another-boot:1:1:1")


class Thing:
    """A fake container or network."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self, **_: object) -> None:
        """Record the removal while a signal arrives."""
        os.kill(os.getpid(), signal.SIGINT)
        self.removed = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_remove_everything_and_do_not_interrupt_the_removal(number: signal.Signals) -> None:
    """Ctrl-C, a termination and a hang-up; Ctrl-C also during the removal."""
    container, network = Thing(), Thing()
    with pytest.raises(KeyboardInterrupt), remove_on_exit([container], [network]):  # type: ignore[list-item]
        os.kill(os.getpid(), number)
    assert (container.removed, network.removed) == (True, True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_network_is_removed_once_its_endpoints_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.0)
    busy = docker.errors.APIError("network rlhf-stacks-1 has active endpoints")
    network = MagicMock(**{"remove.side_effect": [busy, busy, None]})
    with remove_on_exit([], [network]):
        pass
    assert network.remove.call_count == 3


def test_a_network_that_cannot_be_removed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, refused = (docker.errors.APIError(each) for each in ("it has active endpoints", "not permitted"))
    monkeypatch.setattr(cluster, "RELEASE_SECONDS", 0)
    for error in (busy, refused):
        network = MagicMock(**{"remove.side_effect": error})
        with pytest.raises(docker.errors.APIError) as raised, remove_on_exit([], [network]):
            pass
        assert raised.value is error


@pytest.mark.parametrize("code", [126, 137])
def test_a_command_that_fails_while_its_container_ends_names_the_node(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker kills the command, or does not start it, before it reports that the container has ended."""
    client = create_autospec(docker.DockerClient)
    nodes = Cluster(client, "an-image", [ContainerNode("worker", gpus=1)])
    state = {"Running": True, "OOMKilled": False, "ExitCode": 137}
    container = MagicMock(attrs={"State": state}, **{"logs.return_value": b"started"})
    container.wait.side_effect = lambda **_: state.update(Running=False)
    nodes.containers = [container]
    done = subprocess.CompletedProcess([], code, b"", cluster.NOT_STARTED.encode())
    monkeypatch.setattr(cluster, "_exec", lambda *_: ["docker"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match="node worker ended: it was killed"):
        nodes.output(container, ["python"])


def test_a_command_that_docker_did_not_start_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an error of the command itself ends the wait, with its last line."""
    client = create_autospec(docker.DockerClient)
    nodes = Cluster(client, "an-image", [ContainerNode("head", gpus=1)])
    answers = [(126, f"{cluster.NOT_STARTED}: error executing setns process"), (0, '[{"host": "head"}]')]

    def follow(_: object, line: Callable[[str], None], timeout: float) -> int:
        code, text = answers.pop(0)
        assert timeout > 1
        line(text)
        return code

    monkeypatch.setattr(nodes, "follow", follow)
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.0)
    nodes.wait_for_nodes(60)
    assert nodes.addresses == [{"host": "head"}]
    answers.append((1, "1 of 2 nodes has joined"))
    with pytest.raises(UserError, match="did not start: 1 of 2 nodes has joined"):
        nodes.wait_for_nodes(60)


def test_a_command_that_hangs_in_a_node_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Cluster(create_autospec(docker.DockerClient), "an-image", [ContainerNode("worker", gpus=1)])
    container = MagicMock()
    container.name = "worker"
    monkeypatch.setattr(cluster, "_exec", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(UserError, match=r"worker: python did not end within 0 s"):
        nodes.output(container, ["python"], timeout=0.1)


def test_a_container_that_does_not_end_is_killed_and_an_error() -> None:
    """As one whose interpreter hangs at its exit; only the kill ends it."""
    container, ended = MagicMock(), threading.Event()
    container.kill.side_effect = ended.set
    with (
        pytest.raises(UserError, match="patches did not end within 1e-05 hours: its container was killed"),
        cluster.killed_after(1e-5, container, "patches"),
    ):
        assert ended.wait(30)


def test_the_time_limit_of_a_container_that_ended_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = MagicMock()
    monkeypatch.setattr(threading, "Timer", timer)
    with cluster.killed_after(2.0, MagicMock(), "patches"):
        timer.return_value.cancel.assert_not_called()
    timer.return_value.cancel.assert_called_once_with()
    assert timer.call_args.args[0] == 2 * 3600
