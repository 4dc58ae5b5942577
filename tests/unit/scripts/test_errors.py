"""What an error of the system looks like to the user: one line that names the file, or what failed."""

import errno
import os
import signal
from unittest.mock import MagicMock

import pytest

from scripts import errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space", "/a"), "error: no space left on the disk of /a: No space"),
        (OSError(errno.EACCES, "Denied", "/a", None, "/b"), "error: /b: Denied"),
        (OSError(errno.ENOSPC, "No space"), "error: the output could not be written: No space"),
        (OSError(errno.EMFILE, "Too many"), "error: a system call failed: Too many"),
        (OSError("only text"), "error: a system call failed: only text"),
    ],
)
def test_an_error_of_the_system_is_one_line(
    error: OSError, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    with pytest.raises(SystemExit) as ended:
        errors.run(MagicMock(side_effect=error))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{line}\n"
