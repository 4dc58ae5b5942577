"""The benchmark of a cold build reuses nothing, and our Dockerfile still finds its folders."""

from scripts.paths import ROOT
from tests.bench.build import without_downloads


def test_a_cold_build_has_no_cache_and_every_folder() -> None:
    dockerfile = (ROOT / "images" / "Dockerfile").read_text(encoding="utf-8")
    cold = without_downloads(dockerfile)
    assert "type=cache" in dockerfile
    assert "type=cache" not in cold
    wheels, downloads = "target=/var/cache/wheels", "type=cache,id=rlhf-stacks-uv"
    assert cold.count(f"type=tmpfs,{wheels}") == dockerfile.count(wheels) > 0
    assert cold.count("UV_NO_CACHE=1 /opt/tools/install-layer") == dockerfile.count(downloads)
