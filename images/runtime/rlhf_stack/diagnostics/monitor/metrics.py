"""Fetches and parses the metrics that nodes export in Prometheus text format."""

import http.client
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlhf_stack.cluster.direct import open_directly
from rlhf_stack.cluster.host import endpoint

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
MOST_REQUESTS = 64  # at the same time
MOST_BYTES = 16 << 20  # of an answer
TAG = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """A value of a metric, with its tags (names in lower case) and the node that exported it."""

    node: str
    name: str
    tags: dict[str, str]
    value: float


def parse(node: str, text: str) -> Iterator[Sample]:
    """Parse the samples that ``node`` exported; malformed lines are skipped."""
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            tags = {name.lower(): value for name, value in TAG.findall(match[2] or "")}
            try:
                yield Sample(node, match[1], tags, float(match[3]))
            except ValueError:
                continue


def scrape(endpoints: Sequence[tuple[str, int]], seconds: float) -> list[Sample]:
    """Fetch the samples of nodes (address, port); none from a node that does not respond in ``seconds``.

    Of an answer that is cut, or longer than `MOST_BYTES`, all whole lines count.
    """

    def fetch(target: tuple[str, int]) -> list[Sample]:
        address, port = target
        try:
            with open_directly(f"http://{endpoint(address, port)}/metrics", seconds) as answer:
                text: str = answer.read(MOST_BYTES).decode(errors="replace")
        except (OSError, http.client.HTTPException):  # HTTPException: what answers is no HTTP server
            return []
        return list(parse(address, text.rpartition("\n")[0]))

    with ThreadPoolExecutor(max_workers=MOST_REQUESTS) as pool:
        return [sample for samples in pool.map(fetch, endpoints) for sample in samples]
