"""Load of the busiest engine if prompts are divided by number instead of by expected tokens.

``PYTHONPATH=images/runtime python -m tests.bench.balance [--json]``; a second, no Docker. A computation, not
a measurement: work is tokens, lengths are drawn from a seed. "Answers of any length" are drawn too and
unknown when the prompts are divided; otherwise every answer has the maximum length.
"""

import argparse
import random
import statistics
import sys

from rlhf_stack.engine import request_balancer

from tests.bench.results import Row, show

BATCHES = 200
PROMPTS = 128
ANSWER = 256
LENGTHS = {"even": 0.1, "skewed": 1.0, "very skewed": 1.6}  # sigma of the logarithm


def lengths(choose: random.Random, sigma: float) -> list[int]:
    """Draw the lengths of a batch's prompts, around 500 tokens."""
    return [max(1, min(8192, round(choose.lognormvariate(6.2, sigma)))) for _ in range(PROMPTS)]


def busiest(engines: list[int], work: list[int], count: int) -> float:
    """Return the work of the busiest engine, as a multiple of the mean."""
    return request_balancer.makespan(work, [0] * count, engines) * count / sum(work)


def compare(sigma: float, count: int, any_length: bool) -> tuple[float, float]:
    """Return the busiest engine's load by tokens and by number of prompts: means of `BATCHES` batches."""
    choose = random.Random(0)  # noqa: S311
    ours, peer = [], []
    for _ in range(BATCHES):
        prompts = lengths(choose, sigma)
        planned = [length + ANSWER for length in prompts]
        true = [length + (choose.randrange(1, ANSWER + 1) if any_length else ANSWER) for length in prompts]
        ours.append(busiest(request_balancer.assign(planned, [0] * count), true, count))
        size = -(-PROMPTS // count)
        peer.append(busiest([prompt // size for prompt in range(PROMPTS)], true, count))
    return statistics.mean(ours), statistics.mean(peer)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.balance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = []
    for name, sigma in LENGTHS.items():
        for count in (2, 8, 32):
            for any_length in (False, True):
                answers = ", answers of any length" if any_length else ""
                ours, peer = compare(sigma, count, any_length)
                rows.append(Row(f"{name} prompts, {count} engines{answers}", "x mean", ours, peer))
    show(rows, [f"{PROMPTS} prompts a batch, mean of {BATCHES}"], options.json, "by number")
    return 0


if __name__ == "__main__":
    sys.exit(main())
