"""Links between the containers of a test that are cut or slowed, from the host and only for these containers.

What is done is done in the container's own network namespace, and ends with it.
"""

import os
import shutil
import subprocess

from docker.models.containers import Container

TOOLS = ("nsenter", "tc", "iptables")


def obstacle() -> str:
    """Why links cannot be changed here; empty if they can."""
    if os.geteuid() != 0:
        return "only root may change a container's links"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def block(receiver: Container, sender: str, *, only_new: bool = False) -> None:
    """Let nothing, or no new connection, of address ``sender`` reach ``receiver``."""
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
    """Let everything through again."""
    _inside(receiver, "iptables", "-F", "INPUT")


def slow_down(sender: Container, megabits: int) -> None:
    """Limit what ``sender`` sends, in 10^6 bits a second, as a slow card would."""
    rate = [f"{megabits}mbit", "burst", "32kbit", "latency", "400ms"]
    _inside(sender, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", *rate)


def speed_up(sender: Container) -> None:
    """End `slow_down`."""
    _inside(sender, "tc", "qdisc", "del", "dev", "eth0", "root")


def _inside(container: Container, *command: str) -> None:
    container.reload()
    namespace = f"--net=/proc/{container.attrs['State']['Pid']}/ns/net"
    subprocess.run(["nsenter", namespace, "--", *command], check=True, capture_output=True, text=True)
