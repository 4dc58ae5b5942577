"""How nodes are started, and when something of a run counts as left behind."""

import os
import signal
import subprocess
import sys

import pytest

from scripts.testing.cluster import Node, is_orphaned, owner, ray_start, removed_at_the_end


def test_head_and_worker_are_started_as_on_two_machines() -> None:
    """The worker knows the head's name and nothing else."""
    head = ray_start(Node("head", gpus=2), None)
    worker = ray_start(Node("worker", gpus=2), "head")
    assert "--head" in head
    assert "--address=head:6379" in worker
    assert "--head" not in worker
    for command in (head, worker):
        assert "--num-gpus=2" in command
        assert any(word.startswith("--object-store-memory=") for word in command)


def test_a_living_process_owns_what_it_made() -> None:
    """Of this machine, and started when its label says."""
    assert not is_orphaned(owner())


def test_an_ended_process_owns_nothing() -> None:
    """Also when its id was given to another process since."""
    code = "from scripts.testing.cluster import owner; print(owner())"
    label = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert is_orphaned(label)
    boot, namespace, _, _ = owner().split(":")
    assert is_orphaned(f"{boot}:{namespace}:{os.getpid()}:1")


def test_what_another_machine_owns_is_not_judged() -> None:
    """An engine may serve several machines."""
    assert not is_orphaned("another-boot:1:1:1")


class Thing:
    """Stands for a container or a network."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self, **_: object) -> None:
        """Note it, while signals come in."""
        os.kill(os.getpid(), signal.SIGINT)
        self.removed = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_remove_everything_and_do_not_cut_it_short(number: signal.Signals) -> None:
    """Ctrl-C, a termination and a hang-up, the first also while things are being removed."""
    container, network = Thing(), Thing()
    with pytest.raises(KeyboardInterrupt), removed_at_the_end([container], [network]):  # type: ignore[list-item]
        os.kill(os.getpid(), number)
    assert (container.removed, network.removed) == (True, True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
