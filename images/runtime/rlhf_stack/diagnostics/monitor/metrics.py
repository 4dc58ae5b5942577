"""The text that a node exports for Prometheus: read, and asked for."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
TAG = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One value of a metric, with its tags (their names in lower case) and the node that exported it."""

    node: str
    name: str
    tags: dict[str, str]
    value: float


def parse(node: str, text: str) -> Iterator[Sample]:
    """The samples in what ``node`` exported; a line that is none is left out."""
    for line in text.splitlines():
        match = LINE.match(line)
        if match:
            tags = {name.lower(): value for name, value in TAG.findall(match[2] or "")}
            try:
                yield Sample(node, match[1], tags, float(match[3]))
            except ValueError:
                continue


def scrape(endpoints: Sequence[tuple[str, int]], seconds: float) -> list[Sample]:
    """What the nodes (address and port) export; one that does not answer within ``seconds`` exports
    nothing."""

    def ask(endpoint: tuple[str, int]) -> list[Sample]:
        address, port = endpoint
        try:
            with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=seconds) as answer:
                return list(parse(address, answer.read().decode(errors="replace")))
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return []

    with ThreadPoolExecutor(max_workers=max(1, len(endpoints))) as pool:
        return [sample for samples in pool.map(ask, endpoints) for sample in samples]
