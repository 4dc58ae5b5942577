"""Whoever runs the image, however strictly, has a name, a HOME and caches to write to."""

import getpass
import os
import tempfile
from pathlib import Path


def test_user_is_not_root() -> None:
    """The image's default, and every other user that these tests are run as."""
    assert os.getuid() != 0


def test_user_has_a_name_without_a_passwd_entry() -> None:
    """torch names its cache after the user, and fails where there is none."""
    assert getpass.getuser()


def test_home_can_be_written() -> None:
    """Caches of vLLM, Hugging Face and torch lie there."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        Path(folder, "file").write_text("content")
