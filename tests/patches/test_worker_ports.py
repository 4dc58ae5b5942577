"""Where the ports of a node's workers begin, as `ray start` has them; nothing is started.

What follows from it takes two machines: `tests/faults` cuts the link of one while an engine starts there.
"""

import pytest

PROBE = """
import ray._private.node
from click.testing import CliRunner
from ray.scripts import scripts


class Ports(Exception):
    pass


class Disagreement(Exception):
    pass


def node(params, **_):
    raise Ports(params.min_worker_port, params.max_worker_port)


def start(*options):
    error = CliRunner().invoke(scripts.start, ["--head", "--port=0", *options]).exception
    assert isinstance(error, Ports), error
    return error.args


replace(ray._private.node, Node=node)
chosen = "--min-worker-port=12000", "--max-worker-port=12100"
if start(*chosen) != (12000, 12100) or start(chosen[1]) != (10002, 12100):
    raise Disagreement("the ports that the user chose are ignored")
ranges = [start() for _ in range(8)]
if not all(10002 <= first <= 18999 and last == 19999 for first, last in ranges):
    raise Disagreement(f"ports that Ray does not have: {ranges}")
if len(set(ranges)) == 1:
    raise Disagreement(f"the first worker has port {ranges[0][0]} at each start")
"""


@pytest.mark.patch(
    "ray/2.12.0/0004-change-worker-ports-at-each-start", "ray/2.9.3/0003-change-worker-ports-at-each-start"
)
def test_the_workers_of_a_node_that_comes_back_have_other_ports(proves):
    proves(PROBE, "has port 10002 at each start")
