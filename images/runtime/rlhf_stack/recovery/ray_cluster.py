"""The Ray cluster of a supervised run, as `supervisor.Cluster` describes it."""

import os
from collections.abc import Callable, Sequence
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

    ``assess`` returns why a command line cannot start now, ``environment`` the ``runtime_env`` of a job, and
    ``causes`` the known causes in an output that the versions and settings of this image confirm. A head that
    does not answer is awaited for ``seconds`` while a job runs.
    """

    def __init__(
        self,
        server: str,
        address: str,
        run: str,
        assess: Callable[[Sequence[str], bool], list[str]],
        environment: Callable[[], dict[str, Any]],
        causes: Callable[[str], list[str]],
        seconds: float,
    ) -> None:
        self._server, self._address, self._key = server, address, PREFIX + run
        self._assess, self._environment = assess, environment
        self.known_causes, self._seconds = causes, seconds
        self._excluded_by_user = set(filter(None, os.environ.get(env_vars.EXCLUDED_NODES, "").split(",")))

    def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
        """Return why the run cannot start on the free resources of nodes that are not ``excluded``.

        With ``scales``, too few resources are no problem if the run may ask an autoscaler for them.
        """
        self._exclude(excluded)
        return self._assess(words, scales)

    def submit(self, words: Sequence[str], excluded: Sequence[str]) -> str:
        """Submit the run; no rank or engine of it is placed on an ``excluded`` node."""
        self._exclude(excluded)
        return jobs.submit(self._server, words, self._environment())

    def follow(self, job: str, write: Callable[[str], None]) -> Ended:
        """Follow a job until it ends."""
        return jobs.follow(self._server, job, write, self._seconds)

    def clean(self) -> Nodes:
        """Remove what the run left on each node."""
        with connected(self._address):
            return clean_nodes()

    def remember(self, state: dict[str, Any]) -> None:
        """Keep ``state`` in the GCS, which a restart of the head empties."""
        with connected(self._address):
            gcs_kv.put_record(self._key, state)

    def recall(self) -> dict[str, Any] | None:
        """Return the state that a supervisor of this run kept, None if there is none."""
        with connected(self._address):
            return next((state for state in gcs_kv.list_records(self._key) if state), None)

    def _exclude(self, nodes: Sequence[str]) -> None:
        """Exclude ``nodes`` and those of the user from the placement of this process and of its jobs."""
        os.environ[env_vars.EXCLUDED_NODES] = ",".join(sorted({*self._excluded_by_user, *nodes}))
