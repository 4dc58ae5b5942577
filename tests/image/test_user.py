"""Every user that runs the image has a name, and a HOME and caches that are writable."""

import getpass
import os
import tempfile
from pathlib import Path


def test_user_is_not_root() -> None:
    """Neither the image's default user nor any other user of these tests is root."""
    assert os.getuid() != 0


def test_user_has_a_name_without_a_passwd_entry() -> None:
    """torch names its cache after the user, and fails without a name."""
    assert getpass.getuser()


def test_home_is_writable() -> None:
    """HOME contains the caches of vLLM, Hugging Face and torch."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        Path(folder, "file").write_text("content")
