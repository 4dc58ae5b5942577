"""Containers of one image as the nodes of a Ray cluster, each with its own address, as on several machines.

Whatever happens (an error, Ctrl-C, a terminated process), nothing of it is left behind: `Cluster` removes its
containers, volumes and network when it ends, and removes first what a killed process could not.
"""

import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import docker
import docker.errors
import requests.exceptions
from docker.models.containers import Container
from docker.models.networks import Network

from scripts.docker.client import docker_command
from scripts.errors import UserError, interrupt

LABEL = "rlhf-stacks.owner"
PORT = 6379
STARTED = b"Ray runtime started"
POLL_SECONDS = 0.5
MEGABYTE = 1 << 20
KILLED = 137
END_SECONDS = 5
SHARES, SHARES_AT_START = 1024, 32768  # of the CPUs, against containers that have Docker's own 1024


@dataclass(frozen=True)
class Node:
    """A machine to be: its host name and what Ray is told of it. ``gpus`` are fake: there is no device."""

    name: str
    gpus: int
    cpus: int = 8
    object_store: int = 300 * MEGABYTE
    shm: int = 1024 * MEGABYTE


def ray_start(node: Node, head: str | None) -> list[str]:
    """The ``ray start`` of a node; ``head`` is the head's host name, or None for the head itself.

    The object store gets a size because Ray would else ask for more than /dev/shm has.
    """
    role = (
        ["--head", f"--port={PORT}", "--dashboard-host=127.0.0.1"]
        if head is None
        else [f"--address={head}:{PORT}"]
    )
    resources = [
        f"--num-gpus={node.gpus}",
        f"--num-cpus={node.cpus}",
        f"--object-store-memory={node.object_store}",
    ]
    return ["ray", "start", *role, *resources, "--block", "--disable-usage-stats"]


def owner() -> str:
    """This process in a label: where its id counts, its id, and when it started, as ids are used again."""
    return ":".join([*_place(), str(os.getpid()), _started(os.getpid())])


def is_orphaned(label: str) -> bool:
    """Whether the process that `owner` named has ended; no, if this one cannot know."""
    *place, pid, started = label.split(":")
    return place == _place() and pid.isdecimal() and _started(int(pid)) != started


def _place() -> list[str]:
    """The boot of this machine, and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, str(Path("/proc/self/ns/pid").stat().st_ino)]


def _started(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


class Cluster:
    """A context: on entry every node is up and known to Ray; on exit nothing of it is left.

    A node that starts goes before all else on this machine: the raylet of Ray 2.55 ends itself, and the node,
    if its agents are not up within 15 s (github.com/ray-project/ray/issues/65983). ``ray start`` ends without
    flushing, so that what it says last would be lost if it were buffered.

    The first of ``nodes`` is the head. ``environment`` reaches every process. ``timeout`` in seconds is for
    the nodes to join. ``start`` is the command of a node, given the head's host name as `ray_start` is.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        image: str,
        nodes: Sequence[Node],
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        options: Mapping[str, Any] | None = None,
        start: Callable[[Node, str | None], list[str]] = ray_start,
    ) -> None:
        self._client = client
        self._image = image
        self._nodes = nodes
        self._environment = dict(environment or {})
        self._timeout = timeout
        self._options = dict(options or {})
        self._command = start
        self._networks: list[Network] = []
        self._end = contextlib.ExitStack()
        self.containers: list[Container] = []
        self.addresses: list[dict[str, Any]] = []

    def __enter__(self) -> "Cluster":
        sweep(self._client)
        self._end.enter_context(removed_at_the_end(self.containers, self._networks))
        try:
            self._start()
            self.wait(self._timeout)
            for container in self.containers:
                container.update(cpu_shares=SHARES)
        except BaseException:
            self._end.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()

    @property
    def head(self) -> Container:
        """The head's container."""
        return self.containers[0]

    def check(self) -> None:
        """A `UserError` that names the node, if one of the containers is no longer running."""
        for node, container in zip(self._nodes, self.containers, strict=False):
            try:
                container.reload()
            except docker.errors.NotFound:
                raise UserError(f"node {node.name} is gone: somebody removed its container") from None
            state = container.attrs["State"]
            if not state["Running"]:
                raise UserError(
                    f"node {node.name} ended: {_why(state)}; its last words: {_last_words(container)}"
                )

    def logs(self) -> dict[str, str]:
        """What each node printed so far, by name."""
        texts = {}
        for node, container in zip(self._nodes, self.containers, strict=False):
            with contextlib.suppress(docker.errors.APIError):
                texts[node.name] = container.logs().decode(errors="replace")
        return texts

    def output(self, container: Container, command: Sequence[str]) -> str:
        """What ``command`` prints in ``container``; a `UserError` if it fails."""
        done = subprocess.run(_exec(container, command), capture_output=True, check=False)
        out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        if done.returncode:
            self._check_after(container, done.returncode)
            last = ((err or out).strip() or "it printed nothing").splitlines()[-1]
            raise UserError(f"{container.name}: {' '.join(command)[:60]} failed ({done.returncode}): {last}")
        return out

    def follow(
        self,
        command: Sequence[str],
        line: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
        timeout: float = 1800.0,
        nodes_may_end: bool = False,
        container: Container | None = None,
    ) -> int:
        """Run ``command`` in ``container``, by default on the head: ``line`` gets its output.

        ``tick`` is called twice a second.

        Returns its exit code. A `UserError` after ``timeout`` seconds, or if a node ends that may not.
        """
        runs_on = container or self.head
        lines: queue.Queue[str | None] = queue.Queue()
        deadline = time.monotonic() + timeout
        checked = 0.0
        process = subprocess.Popen(
            _exec(runs_on, command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
            while True:
                with contextlib.suppress(queue.Empty):
                    text = lines.get(timeout=POLL_SECONDS)
                    if text is None:
                        break
                    line(text)
                if time.monotonic() - checked >= POLL_SECONDS:
                    if not nodes_may_end:
                        self.check()
                    tick()
                    checked = time.monotonic()
                if time.monotonic() > deadline:
                    raise UserError(f"{' '.join(command[:3])} did not end within {timeout:.0f} s")
            code = process.wait()
        finally:
            process.kill()
        if not nodes_may_end:
            self._check_after(runs_on, code)
        return code

    def _check_after(self, container: Container, code: int) -> None:
        """`check`; a killed command is most often the sign of an ending container, which takes its time."""
        if code == KILLED:
            with contextlib.suppress(requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError):
                container.wait(timeout=END_SECONDS)
        self.check()

    def _start(self) -> None:
        labels = {LABEL: owner()}
        run = uuid.uuid4().hex[:8]
        network = f"rlhf-stacks-{run}"
        self._networks.append(self._client.networks.create(network, driver="bridge", labels=labels))
        head = self._nodes[0].name
        for node in self._nodes:
            container = self._client.containers.create(
                self._image,
                self._command(node, None if node.name == head else head),
                name=f"rlhf-stacks-{run}-{node.name}",
                hostname=node.name,
                environment=self._environment,
                labels=labels,
                shm_size=node.shm,
                cpu_shares=SHARES_AT_START,
                network=network,
                networking_config={network: self._client.api.create_endpoint_config(aliases=[node.name])},
                **self._options,
            )
            self.containers.append(container)
            container.start()
            if node.name == head:
                self._wait_for_head()

    def _wait_for_head(self) -> None:
        """Until Ray runs on the head: a node that finds it half started ends instead of waiting."""
        deadline = time.monotonic() + self._timeout
        while STARTED not in self.head.logs():
            self.check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"the cluster did not come up: its head has no Ray after {self._timeout:.0f} s"
                )
            time.sleep(POLL_SECONDS)

    def wait(self, timeout: float) -> None:
        """Until Ray knows all nodes; a `UserError` says what is missing after ``timeout`` seconds."""
        gpus = sum(node.gpus for node in self._nodes)
        command = [
            "python",
            "-m",
            "rlhf_stack.cluster.readiness",
            f"--nodes={len(self._nodes)}",
            f"--gpus={gpus}",
        ]
        output: list[str] = []
        code = self.follow([*command, f"--timeout={timeout}"], output.append, timeout=timeout + 60)
        if code:
            raise UserError(f"the cluster did not come up: {output[-1] if output else 'no reason was given'}")
        self.addresses = json.loads(output[-1])


def sweep(client: docker.DockerClient) -> None:
    """Remove what processes that no longer live have left of their clusters."""
    containers = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    networks = client.networks.list(filters={"label": LABEL})
    with contextlib.suppress(docker.errors.APIError):  # another process of ours sweeps too
        _remove(
            [container for container in containers if is_orphaned(container.labels[LABEL])],
            [network for network in networks if is_orphaned(network.attrs["Labels"][LABEL])],
        )


def _exec(container: Container, command: Sequence[str]) -> list[str]:
    """The docker command that runs ``command`` in ``container``.

    Not by the SDK: it loses what comes in one piece with the answer's head, and then fails on the rest.
    """
    return [*docker_command(), "exec", str(container.id), *command]


def _read(stream: IO[bytes], lines: "queue.Queue[str | None]") -> None:
    """Put each line of ``stream`` into ``lines`` (a carriage return ends one too), and None at its end."""
    for chunk in stream:
        for text in chunk.decode(errors="replace").rstrip("\r\n").split("\r"):
            lines.put(text)
    lines.put(None)


def _why(state: Mapping[str, Any]) -> str:
    if state["OOMKilled"]:
        return "it ran out of memory"
    if state["ExitCode"] == KILLED:
        return "it was killed (exit code 137)"
    return f"exit code {state['ExitCode']}"


def _last_words(container: Container) -> str:
    lines = container.logs(tail=10).decode(errors="replace").split("\n")
    return " / ".join([line.strip() for line in lines if line.strip()][-3:]) or "none"


@contextlib.contextmanager
def removed_at_the_end(containers: Sequence[Container], networks: Sequence[Network] = ()) -> Iterator[None]:
    """Remove all that is in the lists when this ends, however it ends.

    A termination or hang-up counts as Ctrl-C, an exception, so that contexts end; while things are being
    removed none of these cuts it short.
    """

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        try:
            _remove(containers, networks)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _remove(containers: Sequence[Container], networks: Sequence[Network]) -> None:
    """Remove all, first the containers with their volumes; one that cannot be removed holds up no other."""
    with contextlib.ExitStack() as stack:
        for network in networks:
            stack.callback(_unless_gone, network.remove)
        for container in containers:
            stack.callback(_unless_gone, functools.partial(container.remove, force=True, v=True))


def _unless_gone(remove: Callable[[], object]) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        remove()
