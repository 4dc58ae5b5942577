"""The table of what weight syncs are tested with, from the data of the tests."""

import tomllib
from pathlib import Path

from scripts.paths import ROOT

DATA = ROOT / "tests" / "cluster" / "works_with.toml"
COLUMNS = ("model", "dtype", "layout", "backend", "verified")
TRANSFER = "test_weight_transfer.py::test_an_engine_computes_what_the_trainer_computes_after_each_sync"


def rows(data: Path = DATA) -> list[tuple[str, ...]]:
    """Return a row for each entry, in the order of `COLUMNS`; one that is not verified has the reason."""
    found = []
    for row in tomllib.loads(data.read_text(encoding="utf-8"))["row"]:
        is_transfer = "family" in row
        defaults = {
            "dtype": "bfloat16",
            "layout": "two processes of a node" if is_transfer else "any",
            "backend": "gloo" if is_transfer else "any",
            "test": TRANSFER,
        }
        merged = defaults | row
        verified = f"not verified: {row['unverified']}" if "unverified" in row else f"`{merged['test']}`"
        found.append((*(merged[column] for column in COLUMNS[:-1]), verified))
    return found
