"""The report of a demo run, from the events of its processes: as a dict and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scripts.errors import UserError

BARS = "▁▂▃▄▅▆▇█"
AVERAGED = 3
LEAST_GAIN = 0.1  # of the mean reward over the steps of the default demo, which goes from 0.25 to 0.99

Event = Mapping[str, Any]


def build(
    cell: str,
    versions: Mapping[str, str],
    nodes: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """The report of a run. Rewards are means of the first and the last three steps; seconds are by phase.

    A `UserError` if the run recorded no step, no engine, or no sync.
    """
    steps = [event for event in events if event["event"] == "step"]
    engines = [event for event in events if event["event"] == "engine"]
    syncs = [event for event in events if event["event"] == "sync"]
    verified = [event for event in events if event["event"] == "verify"]
    for what, found in (("training step", steps), ("engine", engines), ("weight sync", syncs)):
        if not found:
            raise UserError(f"the run recorded no {what}: see its log")
    rewards = [float(event["reward"]) for event in steps]
    return {
        "cell": cell,
        "versions": dict(versions),
        "nodes": [{"address": node["address"], "host": node["host"], "gpus": node["gpus"]} for node in nodes],
        "engines": [_engine(event) for event in engines],
        "steps": len(steps),
        "reward_first": mean(rewards[:AVERAGED]),
        "reward_last": mean(rewards[-AVERAGED:]),
        "rewards": rewards,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "syncs": [
            {"bytes": event["bytes"], "seconds": event["seconds"], "backend": event["backend"]}
            for event in syncs
        ],
        "weights_equal": bool(verified)
        and verified[-1]["index"] == syncs[-1]["index"]
        and all(event["equal"] for event in verified),
        "parameters_compared": verified[-1]["parameters"] if verified else 0,
    }


def shortfall(report: Mapping[str, Any], steps: int, learns: bool) -> str:
    """Why a run is no proof of the pipeline, "" if it is one.

    It must have taken all ``steps`` and end with equal weights, and, if it ``learns``, with a higher reward:
    a trainer whose updates never reach the engines keeps the reward of the first steps.
    """
    if report["steps"] != steps:
        return f"{report['steps']} of {steps} training steps were recorded"
    if not report["weights_equal"]:
        return "trainer and engines do not hold the same weights after the last sync"
    gain = report["reward_last"] - report["reward_first"]
    if learns and not gain >= LEAST_GAIN:
        return (
            f"the reward rose by {gain:.2f}, from {report['reward_first']:.2f} to "
            f"{report['reward_last']:.2f}: expected at least {LEAST_GAIN}"
        )
    return ""


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, to four digits."""
    return round(sum(values) / len(values), 4)


def _engine(event: Event) -> dict[str, Any]:
    ranks = event["ranks"]
    addresses = sorted({rank["node"] for rank in ranks})
    gpus = [rank["gpu"].rpartition(":")[2] for rank in ranks]  # of a fake GPU, without the node's id
    return {"node": ", ".join(addresses), "gpus": gpus, "straddles": event["straddles"]}


def sparkline(values: Sequence[float]) -> str:
    """A line of one bar for each value from 0 to 1."""
    top = len(BARS) - 1
    return "".join(BARS[max(0, min(top, round(value * top)))] for value in values)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report."""
    console.print(_tables(report))


def _tables(report: Mapping[str, Any]) -> RenderableType:
    places = Table("node", "address", "fake GPUs", "engines", title=report["cell"], title_justify="left")
    for node in report["nodes"]:
        engines = [
            f"engine {index} on GPUs {', '.join(engine['gpus'])}{' STRADDLES' if engine['straddles'] else ''}"
            for index, engine in enumerate(report["engines"])
            if node["address"] in engine["node"].split(", ")
        ]
        places.add_row(node["host"], node["address"], f"{node['gpus']:g}", "\n".join(engines) or "none")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    equal = (
        Text("equal", style="green") if report["weights_equal"] else Text("NOT SHOWN EQUAL", style="bold red")
    )
    syncs = report["syncs"]
    size, spent = sum(sync["bytes"] for sync in syncs), sum(sync["seconds"] for sync in syncs)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("versions", versions)
    facts.add_row(
        "reward",
        f"{report['reward_first']:.2f} → {report['reward_last']:.2f} in {report['steps']} steps  "
        f"{sparkline(report['rewards'])}",
    )
    facts.add_row(
        "weight syncs",
        f"{len(syncs)} over {syncs[-1]['backend']}, {size / 1e6:.1f} MB, {spent / len(syncs):.2f} s each",
    )
    facts.add_row(
        "trainer and engines", Text.assemble(equal, f" ({report['parameters_compared']} parameters)")
    )
    facts.add_row("seconds", ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items()))
    return Group(places, facts)
