"""Blocks or slows links between the containers of a test, from the host and only for these containers.

Changes apply to the container's or the host's end of its link, and end with the container.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

from docker.models.containers import Container

TOOLS = ("nsenter", "tc", "ip", "iptables")


def obstacle() -> str:
    """Return why links cannot be changed on this host; empty if they can."""
    if os.geteuid() != 0:
        return "only root may change a container's links"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def block(receiver: Container, sender: str, *, only_new: bool = False) -> None:
    """Drop all packets, or new connections only, from address ``sender`` to ``receiver``."""
    _inside(
        receiver,
        "iptables",
        "-A",
        "INPUT",
        "-s",
        sender,
        "-p",
        "tcp",
        *(["--syn"] if only_new else []),
        "-j",
        "DROP",
    )


def unblock(receiver: Container) -> None:
    """Undo `block`."""
    _inside(receiver, "iptables", "-F", "INPUT")


def slow_down(sender: Container, megabits: int) -> None:
    """Limit what ``sender`` sends, in 10^6 bit/s, as a slow network card would."""
    _inside(sender, *_limit("eth0", megabits))


def speed_up(sender: Container) -> None:
    """Undo `slow_down`."""
    _inside(sender, "tc", "qdisc", "del", "dev", "eth0", "root")


@contextlib.contextmanager
def slow_towards(receiver: Container, megabits: float) -> Iterator[None]:
    """Limit what ``receiver`` receives, in 10^6 bit/s, but not what it sends."""
    (inner,) = json.loads(_inside(receiver, "ip", "-json", "link", "show", "eth0"))
    interfaces = json.loads(_run("ip", "-json", "link"))
    outer = next(each["ifname"] for each in interfaces if each["ifindex"] == inner["link_index"])
    _run(*_limit(outer, megabits))
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # the interface ended with the container
            _run("tc", "qdisc", "del", "dev", outer, "root")


def _limit(interface: str, megabits: float) -> list[str]:
    rate = [f"{megabits}mbit", "burst", "32kbit", "latency", "400ms"]
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", *rate]


def _inside(container: Container, *command: str) -> str:
    container.reload()
    return _run("nsenter", f"--net=/proc/{container.attrs['State']['Pid']}/ns/net", "--", *command)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
