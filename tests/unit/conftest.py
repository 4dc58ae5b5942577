"""Settings of property tests, and a GPU and a proxy that tests share."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.unit import fake_cuda
from tests.unit.stub_server import serving

# Property tests may take their time: the machine is shared, and a slow one is no mistake of the code.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# A shell without job control starts what it puts in the background with SIGINT ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["newest", "oldest"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.Gpu]:
    """A fake GPU and torch for it; of its streams, the newest or the oldest one runs first."""
    gpu = fake_cuda.install(monkeypatch, request.param)
    yield gpu
    gpu.nccl.ended.set()


@pytest.fixture
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment names a proxy, which reaches no machine of a cluster."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
    with serving(503) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        yield
