"""The addresses that the Ray Client server of a head binds to; nothing is started."""

import pytest

PROBE = """
from unittest.mock import MagicMock

import ray._private.grpc_utils
from ray.util.client.server import proxier


class Disagreement(Exception):
    pass


def bound(host):
    addresses.clear()
    proxier.serve_proxier(host, 10001, None)
    return list(addresses)


addresses = []
replace(ray._private.grpc_utils, create_grpc_server_with_interceptors=MagicMock())
replace(
    proxier, ProxyManager=MagicMock(), add_port_to_grpc_server=lambda _, address: addresses.append(address)
)
if bound("10.0.0.1") != ["127.0.0.1:10001", "10.0.0.1:10001"]:
    raise Disagreement(f"an IPv4 address changed: {bound('10.0.0.1')}")
if bound("fd00::1")[-1] != "[fd00::1]:10001":
    raise Disagreement(f"gRPC cannot bind to {bound('fd00::1')[-1]}")
"""


@pytest.mark.patch("ray/2.55.0/0001-bind-the-client-server-to-ipv6")
def test_the_client_server_binds_to_an_ipv6_address(proves):
    proves(PROBE, "gRPC cannot bind to fd00::1:10001")
