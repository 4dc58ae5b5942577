"""rlhf_stack.known_bad.log_file: large, long-lined, UTF-16, compressed and binary logs."""

import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
from rlhf_stack import known_bad
from rlhf_stack.errors import UserError
from rlhf_stack.known_bad import log_file

ERROR = "ValueError: No available memory for the cache blocks.\n"
ROWS = known_bad.load()


def ids_of(text: str) -> list[str]:
    """Return the ids of what explains a log."""
    return [one.id for one in known_bad.explain(ROWS, text)]


class Pipe(io.BytesIO):
    """A stream that cannot seek, as standard input in a pipeline."""

    def seekable(self) -> bool:
        return False


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MAX_BYTES", 1 << 16)
    monkeypatch.setattr(log_file, "CHUNK", 1 << 12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [io.BytesIO, Pipe])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("lines", [0, 1, 5000, 5001])
def test_the_end_of_a_log_is_read(kind: type[io.BytesIO], encoding: str, lines: int) -> None:
    """An error near the end is found, and its line is counted from the end if the start was not read."""
    text = "".join(f"INFO step {number} of ten thousand steps\n" for number in range(lines)) + ERROR + "bye\n"
    data = text.encode(encoding)
    read = known_bad.read_log(kind(data), "job.log")
    assert read.complete == (len(data) <= log_file.MAX_BYTES)
    (found,) = known_bad.explain(ROWS, read.text, complete=read.complete)
    assert (found.id, found.line) == ("vllm-no-cache-memory", lines + 1 if read.complete else -2)
    assert text.endswith(read.text)
    assert read.complete or len(read.text) > log_file.MAX_BYTES // 4


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_and_windows_lines_are_read(encoding: str) -> None:
    data = ("INFO all is well\r\n" * 20 + ERROR).encode(encoding)
    assert known_bad.read_log(io.BytesIO(data), "x").text == "INFO all is well\n" * 20 + ERROR


def test_a_long_line_is_cut_in_its_middle() -> None:
    data = b"start" + b"x" * (1 << 20) + ERROR.encode()
    text = known_bad.read_log(io.BytesIO(data), "x").text
    assert len(text) < 2 * log_file.MAX_LINE
    assert text.startswith("startx")
    assert text.endswith(ERROR)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("data", [b"x", b"a b=", b"wandb: ERROR ", b"\r\x1b[0m", b"NCCL WARN \n"])
def test_a_large_log_is_explained_in_bounded_time_and_memory(data: bytes, tmp_path: Path) -> None:
    """A gigabyte of which most is sparse: only the end is read."""
    path = tmp_path / "job.log"
    with path.open("wb") as file:
        file.seek(1 << 30)
        file.write(data * (20_000_000 // len(data)) + b"\n" + ERROR.encode())
    tracemalloc.start()
    with path.open("rb") as file:
        read = known_bad.read_log(file, "job.log")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * log_file.MAX_BYTES
    assert [one.id for one in known_bad.explain(ROWS, read.text)][:1] == ["vllm-no-cache-memory"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "unit",
    [
        *("NCCL WARN ", "a.b.c.Error", "TypeError: A", "A", "mlx5:", "NET/OFI "),
        *("Failed to bind to address ", "((((", "\n", " ", "1"),
    ],
)
def test_no_pattern_takes_long_on_lines_that_repeat_its_start(unit: str) -> None:
    """Seconds for 1 MiB, where a pattern that is cubic in the length of a line takes minutes."""
    line = (unit * (log_file.MAX_LINE // len(unit))) + "\n"
    text = line * ((1 << 20) // len(line))
    known_bad.explain(ROWS, text)
    known_bad.last_error(text)
    known_bad.first_error(text)


def test_a_compressed_log_is_refused_with_the_command_that_reads_it() -> None:
    with pytest.raises(UserError, match=r"`zcat job.log.gz \| rlhf-stack doctor --log -`"):
        known_bad.read_log(io.BytesIO(gzip.compress(b"text")), "job.log.gz")


@pytest.mark.parametrize("data", [bytes(range(8)) * 1000, bytes(range(256)) * 16], ids=["nul", "any"])
def test_a_binary_file_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match=r"^model.bin is not a text file$"):
        known_bad.read_log(io.BytesIO(data), "model.bin")


def test_a_log_in_another_encoding_is_read() -> None:
    text = "训练报错: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert ids_of(known_bad.read_log(io.BytesIO(text.encode("gbk")), "x").text) == ["gpu-out-of-memory"]


def test_a_few_null_bytes_do_not_make_a_log_binary() -> None:
    assert known_bad.read_log(io.BytesIO(b"INFO ok\n\0\0\nINFO still ok\n"), "x").complete
