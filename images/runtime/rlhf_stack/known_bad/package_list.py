"""Reads the versions of packages from the formats in which people paste them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

NAME, VERSION = r"[A-Za-z0-9][\w.-]*", r"\d[\w.!+%-]*"
START = r"(?:[-*]\s+)?(?:\[(?:pip3?|conda)\]\s+)?"
# Names that reports write in words, as in "Ray: 2.46.0", "vLLM Version: 0.8.4" or "ray, version 2.40.0".
SPOKEN = {"pytorch": "torch", "libc": "glibc", "flash attention": "flash-attn"}
IN_WORDS: tuple[str, ...] = (
    "deepspeed",
    "flash-attn",
    "openrlhf",
    "python",
    "ray",
    "torch",
    "transformers",
    "trl",
)
IN_WORDS += ("triton", "verl", "vllm", *SPOKEN)
FORMATS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<name>{NAME})(?:\[.*?\])? @ \S*?/[\w.]+-(?P<version>[^-/]+)-[^/]+\.whl\b",  # a local wheel
        rf"(?P<name>{NAME})(?:\[.*?\])? @ git\+\S+@v?(?P<version>\d+\.{VERSION})",  # a tag
        rf"(?P<name>{NAME})(?:\[.*?\])? @ (?P<version>[a-z+]+://)",
        rf"-e (?P<version>[a-z+]+://)\S+#egg=(?P<name>{NAME})",
        rf"{START}(?P<name>{NAME})(?:\[.*?\])?\s*={{2,3}}\s*(?P<version>[^\s;\\#,]+)",
        rf"-\s+(?P<name>{NAME})=(?P<version>{VERSION})",  # an environment of conda
        rf"{START}(?P<name>{NAME})\s+(?P<version>\d+\.{VERSION})(?:\s+\S+){{0,3}}$",  # columns
        rf"(?P<name>{NAME})(?:\[.*?\])? v(?P<version>\d+\.{VERSION})(?:\s+[\[(].*)?$",  # `uv pip tree`
        rf"{START}(?i:(?P<name>{'|'.join(IN_WORDS)}))(?i:[ _]version)?\s*[:=,]?\s*(?i:version)?\s*"
        rf"(?:glibc-)?v?(?P<version>{VERSION})",
    )
)
FILLER = re.compile(r"[`|\"'*│├└─]|^> ?")
FORMAT_NAMES = (
    "`pip freeze`, `pip list`, `pip show`, `conda list`, `uv pip tree`, a lock file, the collect_env of "
    "torch or vLLM, `docker inspect`, or one package per line, such as torch==2.9.0"
)
EXACT = FORMATS[:5]  # what they name is meant as a version, in contrast to a number after a word
BLOCK = re.compile(r"^Name: (\S+)\nVersion: (\S+)", re.MULTILINE)  # of `pip show`
UV_PACKAGE = re.compile(r'^name = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class PackageList:
    """What was read: versions by canonical name, the number of lines or entries that named one, and
    ``skipped``, the entries whose version is none, as name==version, or name @ the start of an address.
    """

    versions: dict[str, str]
    lines: int
    skipped: tuple[str, ...]


def freeze(text: str) -> dict[str, str]:
    """The versions by canonical name."""
    return read_versions(text).versions


def read_versions(text: str) -> PackageList:
    """Read ``pip freeze``, ``pip list`` in columns or JSON, ``pip show``, ``conda list`` and hashed locks.

    Also ``uv pip tree``, ``uv.lock``, the collect_env of torch and vLLM, versions in words, and the labels in
    the output of ``docker inspect``. Other lines are ignored.
    """
    found = list(_from_json(text)) or UV_PACKAGE.findall(text)
    if not found:
        found = [pair for line in text.splitlines() for pair in _from_line(line.strip())]
        found += BLOCK.findall(text)
    valid = [(name, version) for name, version in found if _is_version(version)]
    skipped = tuple(
        f"{name} @ {version}..." if version.endswith("://") else f"{name}=={version}"
        for name, version in found
        if not _is_version(version)
    )
    return PackageList({str(canonicalize_name(name)): of for name, of in valid}, len(valid), skipped)


def _from_line(line: str) -> Iterator[tuple[str, str]]:
    """The package of a line, also with an invalid version if the format leaves no doubt that it is one."""
    plain = FILLER.sub("", line).strip()
    for pattern in FORMATS:
        if match := pattern.match(plain):
            version = match["version"].replace("%2B", "+")
            if pattern in EXACT or _is_version(version):
                yield SPOKEN.get(match["name"].lower(), match["name"]), version
            return


def _is_version(text: str) -> bool:
    try:
        return bool(Version(text))
    except InvalidVersion:
        return False


def _from_json(text: str) -> Iterator[tuple[str, str]]:
    """Entries with name and version anywhere in a JSON document, and versions in labels of an image."""
    if not text.lstrip().startswith(("{", "[")):
        return
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    pending = [document]
    while pending:
        value: Any = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            name, version = value.get("name"), value.get("version")
            if isinstance(name, str) and isinstance(version, str):
                yield name, version
            for key, item in value.items():
                if isinstance(item, dict | list):
                    pending.append(item)
                elif isinstance(item, str) and ".version." in key and _is_version(item):
                    yield key.rpartition(".version.")[2], item
