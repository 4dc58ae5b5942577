"""The Ray cluster of a supervised run, as `supervisor.Cluster` describes it."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_stack.cluster import gcs_kv
from rlhf_stack.cluster.connect import connected
from rlhf_stack.config import env_vars
from rlhf_stack.recovery import job as jobs
from rlhf_stack.recovery.job import Ended
from rlhf_stack.recovery.nodes import Nodes, clean_nodes

PREFIX = "supervised/"


class RayCluster:
    """A job server at ``server`` and the cluster at ``address``; ``run`` identifies the run in its GCS.

    ``assess`` returns why a command line cannot start now with the variables of its job, ``environment`` the
    ``runtime_env`` of a job, and ``causes`` the known causes in an output that the versions and settings of
    this image confirm. A head that does not answer is awaited for ``seconds`` while a job runs.
    """

    def __init__(
        self,
        server: str,
        address: str,
        run: str,
        assess: Callable[[Sequence[str], Mapping[str, str], bool], list[str]],
        environment: Callable[[], dict[str, Any]],
        causes: Callable[[str], list[str]],
        seconds: float,
    ) -> None:
        self._server, self._address, self._key = server, address, PREFIX + run
        self._assess, self._environment = assess, environment
        self.known_causes, self._seconds = causes, seconds

    def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
        """Return why the run cannot start on the free resources of nodes that are not ``excluded``.

        With ``scales``, too few resources are no problem if the run may ask an autoscaler for them.
        """
        return self._assess(words, self._environment_without(excluded)["env_vars"], scales)

    def submit(self, job: str, words: Sequence[str], excluded: Sequence[str]) -> None:
        """Submit the run as ``job``; no rank or engine of it is placed on an ``excluded`` node."""
        jobs.submit(self._server, job, words, self._environment_without(excluded), self._seconds)

    def follow(self, job: str, write: Callable[[str], None]) -> Ended:
        """Follow a job until it ends."""
        return jobs.follow(self._server, job, write, self._seconds)

    def clean(self) -> Nodes:
        """Remove what the run left on each node; one that the user excludes need not answer."""
        unused = env_vars.excluded_nodes(os.environ | self._environment()["env_vars"])
        with connected(self._address):
            nodes = clean_nodes()
        return replace(nodes, silent=tuple(address for address in nodes.silent if address not in unused))

    def remember(self, state: dict[str, Any]) -> None:
        """Keep ``state`` in the GCS, which a restart of the head empties."""
        with connected(self._address):
            gcs_kv.put_record(self._key, state)

    def recall(self) -> dict[str, Any] | None:
        """Return what the last supervisor of this run kept, None if there was none."""
        with connected(self._address):
            return next(iter(gcs_kv.list_records(self._key)), None)

    def _environment_without(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return the ``runtime_env`` of a job that is not placed on ``nodes``, nor on those of the user."""
        environment = self._environment()
        if not nodes:
            return environment
        variables = environment["env_vars"]
        excluded = {*env_vars.excluded_nodes(os.environ | variables), *nodes}
        return environment | {"env_vars": variables | {env_vars.EXCLUDED_NODES: ",".join(sorted(excluded))}}
