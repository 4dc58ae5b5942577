"""Containers of one image as the nodes of a Ray cluster, each with its own address, as on several machines.

`Cluster` removes its containers, volumes and network when it ends, also after an error, Ctrl-C or a
termination; on start it removes those of killed processes.
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
from docker.types import IPAMConfig, IPAMPool

from scripts.docker.client import docker_command
from scripts.errors import UserError, interrupt

LABEL = "rlhf-stacks.owner"
PORT = 6379
STARTED = b"Ray runtime started"
POLL_SECONDS = 0.5
MEBIBYTE = 1 << 20
KILLED = 137
CANNOT_EXECUTE = 126  # also Docker's code for a command in a container that ends
NOT_STARTED = "OCI runtime exec failed"  # Docker's message about a command that it did not start
END_SECONDS = 5
RELEASE_SECONDS = 20
SHARES, SHARES_AT_START = 1024, 32768  # of the CPUs, against containers that have Docker's own 1024


@dataclass(frozen=True)
class ContainerNode:
    """A container as a node: its host name and its resources in Ray. ``gpus`` are fake: there is no device.

    ``object_store`` and ``shm`` are in bytes.
    """

    name: str
    gpus: int
    cpus: int = 8
    object_store: int = 300 * MEBIBYTE
    shm: int = 1024 * MEBIBYTE


def ray_start(node: ContainerNode, head: str | None) -> list[str]:
    """The ``ray start`` command of a node; ``head`` is the head's host name, None for the head itself.

    Without an explicit size of the object store Ray requests more than /dev/shm has.
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


def owner_label() -> str:
    """The label of this process: boot, pid namespace, pid and start time, since pids are reused."""
    return ":".join([*_pid_namespace(), str(os.getpid()), _start_time(os.getpid())])


def is_orphan(label: str) -> bool:
    """Whether the process of an `owner_label` has ended; False for one of another machine or namespace."""
    *namespace, pid, started = label.split(":")
    return namespace == _pid_namespace() and pid.isdecimal() and _start_time(int(pid)) != started


def _pid_namespace() -> list[str]:
    """The id of this machine's boot, and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, str(Path("/proc/self/ns/pid").stat().st_ino)]


def _start_time(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19]


class Cluster:
    """A context manager: on entry every node has joined Ray's cluster, on exit everything is removed.

    The first of ``nodes`` is the head. ``environment`` is set in every process. ``timeout`` in seconds is for
    the nodes to join. ``start`` returns the command of a node, with the arguments of `ray_start`. With
    ``ipv6`` nodes have IPv6 addresses too.

    A starting node has priority over everything else on this machine: the raylet of Ray 2.55 ends itself, and
    the node, if its agents are not up within 15 s (github.com/ray-project/ray/issues/65983). ``ray start``
    exits without flushing: its last lines would be lost if its output were buffered.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        image: str,
        nodes: Sequence[ContainerNode],
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        options: Mapping[str, Any] | None = None,
        start: Callable[[ContainerNode, str | None], list[str]] = ray_start,
        ipv6: bool = False,
    ) -> None:
        self._client = client
        self._image = image
        self._nodes = nodes
        self._environment = dict(environment or {})
        self._timeout = timeout
        self._options = dict(options or {})
        self._command = start
        self._ipv6 = ipv6
        self._networks: list[Network] = []
        self._end = contextlib.ExitStack()
        self.containers: list[Container] = []
        self.addresses: list[dict[str, Any]] = []

    def __enter__(self) -> "Cluster":
        sweep(self._client)
        self._end.enter_context(remove_on_exit(self.containers, self._networks))
        try:
            self._start()
            self.wait_for_nodes(self._timeout)
            self._end_priority()
        except BaseException:
            self._end.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()

    def _end_priority(self) -> None:
        try:
            for container in self.containers:
                container.update(cpu_shares=SHARES)
        except docker.errors.APIError:
            self.check()  # Docker does not update a container that has stopped, and does not name the node
            raise

    @property
    def head(self) -> Container:
        """The head's container."""
        return self.containers[0]

    def check(self) -> None:
        """Raise a `UserError` that names the node if one of the containers is no longer running."""
        for node, container in zip(self._nodes, self.containers, strict=False):
            try:
                container.reload()
            except docker.errors.NotFound:
                raise UserError(f"node {node.name} is gone: its container was removed") from None
            state = container.attrs["State"]
            if not state["Running"]:
                raise UserError(
                    f"node {node.name} ended: {_exit_reason(state)}; its last lines: {_last_lines(container)}"
                )

    def logs(self) -> dict[str, str]:
        """The output of each node so far, by name."""
        texts = {}
        for node, container in zip(self._nodes, self.containers, strict=False):
            with contextlib.suppress(docker.errors.APIError):
                texts[node.name] = container.logs().decode(errors="replace")
        return texts

    def output(self, container: Container, command: Sequence[str], timeout: float = 1800.0) -> str:
        """The standard output of ``command`` in ``container``; a `UserError` if it fails or does not end."""
        try:
            done = subprocess.run(
                _exec(container, command), capture_output=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{container.name}: {' '.join(command)[:60]} did not end within {timeout:.0f} s"
            ) from None
        out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
        if done.returncode:
            self._check_after(container, done.returncode)
            last = ((err or out).strip() or "no output").splitlines()[-1]
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
        """Run ``command`` in ``container`` (default: the head's) and return its exit code.

        ``line`` receives each line of its output, ``tick`` is called twice a second. Raises a `UserError`
        after ``timeout`` seconds, and if a node ends unless ``nodes_may_end``.
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
        """`check`, after some seconds if the command was killed or not started: the container may end."""
        if code in (KILLED, CANNOT_EXECUTE):
            with contextlib.suppress(requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError):
                container.wait(timeout=END_SECONDS)
        self.check()

    def _start(self) -> None:
        labels = {LABEL: owner_label()}
        run = uuid.uuid4().hex[:8]
        network = f"rlhf-stacks-{run}"
        # Before Docker 27 an IPv6 network needs its own addresses: a random local /64 (RFC 4193).
        pools = [IPAMPool(subnet=f"fd{run[:2]}:{run[2:6]}:{run[4:]}::/64")] if self._ipv6 else []
        self._networks.append(
            self._client.networks.create(
                network,
                driver="bridge",
                labels=labels,
                enable_ipv6=self._ipv6,
                ipam=IPAMConfig(pool_configs=pools) if pools else None,
            )
        )
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
        """Wait until Ray runs on the head: a node that finds it half started ends instead of waiting."""
        deadline = time.monotonic() + self._timeout
        while STARTED not in self.head.logs():
            self.check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"the cluster did not start: Ray does not run on its head after {self._timeout:.0f} s"
                )
            time.sleep(POLL_SECONDS)

    def wait_for_nodes(self, timeout: float) -> None:
        """Wait until all nodes have joined; a `UserError` names what is missing after ``timeout`` seconds.

        A busy Docker sometimes does not start a command in a container that runs: it is started again.
        """
        gpus = sum(node.gpus for node in self._nodes)
        command = [
            "python",
            "-m",
            "rlhf_stack.cluster.readiness",
            f"--nodes={len(self._nodes)}",
            f"--gpus={gpus}",
        ]
        deadline = time.monotonic() + timeout
        output: list[str] = []
        while self.follow([*command, f"--timeout={timeout}"], output.append, timeout=timeout + 60):
            reason = output[-1] if output else "no reason was given"
            if not reason.startswith(NOT_STARTED) or time.monotonic() > deadline:
                raise UserError(f"the cluster did not start: {reason}")
            time.sleep(POLL_SECONDS)
        self.addresses = json.loads(output[-1])


def sweep(client: docker.DockerClient) -> None:
    """Remove the containers and networks of processes that have ended."""
    containers = client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    networks = client.networks.list(filters={"label": LABEL})
    with contextlib.suppress(docker.errors.APIError):  # another of our processes removes them too
        _remove(
            [container for container in containers if is_orphan(container.labels[LABEL])],
            [network for network in networks if is_orphan(network.attrs["Labels"][LABEL])],
        )


def _exec(container: Container, command: Sequence[str]) -> list[str]:
    """The docker command that runs ``command`` in ``container``.

    Not by the SDK: it loses output that arrives in one packet with the response's header, then fails.
    """
    return [*docker_command(), "exec", str(container.id), *command]


def _read(stream: IO[bytes], lines: "queue.Queue[str | None]") -> None:
    """Put each line of ``stream`` into ``lines`` (a carriage return also ends one), and None at its end."""
    for chunk in stream:
        for text in chunk.decode(errors="replace").rstrip("\r\n").split("\r"):
            lines.put(text)
    lines.put(None)


def _exit_reason(state: Mapping[str, Any]) -> str:
    if state["OOMKilled"]:
        return "it ran out of memory"
    if state["ExitCode"] == KILLED:
        return "it was killed (exit code 137)"
    return f"exit code {state['ExitCode']}"


def _last_lines(container: Container) -> str:
    lines = container.logs(tail=10).decode(errors="replace").split("\n")
    return " / ".join([line.strip() for line in lines if line.strip()][-3:]) or "none"


@contextlib.contextmanager
def remove_on_exit(containers: Sequence[Container], networks: Sequence[Network] = ()) -> Iterator[None]:
    """Remove the ``containers`` and ``networks`` on exit, whatever ends the context.

    A termination or hang-up raises `KeyboardInterrupt`, as Ctrl-C does, so that contexts end; during the
    removal these signals are ignored.
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


@contextlib.contextmanager
def killed_after(hours: float, container: Container, name: str) -> Iterator[None]:
    """Kill the ``container`` if the context has not ended after some hours, which is then a `UserError`."""
    expired = threading.Event()

    def kill() -> None:
        expired.set()
        with contextlib.suppress(docker.errors.APIError):  # it has just ended
            container.kill()

    timer = threading.Timer(hours * 3600, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if expired.is_set():
        raise UserError(f"{name} did not end within {hours:g} hours: its container was killed")


def _remove(containers: Sequence[Container], networks: Sequence[Network]) -> None:
    """Remove the containers with their volumes, then the networks; an error does not stop the rest."""
    with contextlib.ExitStack() as stack:
        for network in networks:
            stack.callback(_ignore_missing, functools.partial(_remove_network, network))
        for container in containers:
            stack.callback(_ignore_missing, functools.partial(container.remove, force=True, v=True))


def _remove_network(network: Network) -> None:
    """Remove a network; a busy daemon releases the endpoints of containers only after it has removed them."""
    repeat_while("has active endpoints", network.remove, RELEASE_SECONDS)


def repeat_while(refusal: str, call: Callable[[], object], seconds: float) -> None:
    """Repeat a call to Docker for up to ``seconds`` while its error contains ``refusal``."""
    end = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except docker.errors.APIError as error:
            if refusal not in str(error) or time.monotonic() >= end:
                raise
        time.sleep(POLL_SECONDS)


def _ignore_missing(remove: Callable[[], object]) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        remove()
