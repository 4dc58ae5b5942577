"""rlhf_stack.known_bad: the rows, their validation and their matching."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from rlhf_stack import known_bad
from rlhf_stack.diagnostics.installed_patches import slug
from rlhf_stack.known_bad import Environment, MalformedRow, Row
from rlhf_stack.known_bad.finding import Finding
from rlhf_stack.known_bad.model import read

from scripts.locks import lockfile
from scripts.matrix.load import Cell, expand, find, load
from scripts.matrix.model import STAND_IN
from scripts.patches.series import Series, load_all, series_of

ROWS = known_bad.load()
LOGS = sorted(Path(__file__).with_name("logs").glob("*.log"))
CELLS = expand(load())
MINIMAL = """[[row]]
id = "a-row"
kind = "crash"
severity = "error"
title = "t"
cause = "c"
remedy = "r"
symptoms = ["some text"]
sources = ["here"]
shown = "run"
"""


def row(**changes: object) -> Row:
    """A row that holds for pkg 1.x, with ``changes``."""
    values: dict[str, object] = {
        "id": "a-row",
        "kind": "crash",
        "severity": "error",
        "title": "t",
        "cause": "c",
        "remedy": "r",
        "symptoms": (),
        "sources": ("here",),
        "shown": "run",
        "packages": {"pkg": SpecifierSet(">=1,<2")},
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def names_of(series: Iterable[Series]) -> set[str]:
    """The names of patches without their numbers."""
    return {slug(patch.name) for one in series for patch in one.patches}


def ids(findings: list[Finding]) -> list[str]:
    return [finding.id for finding in findings]


def test_the_most_important_rows_exist() -> None:
    """The ids are listed here, so that the loss of a row is noticed."""
    carried = {found.id for found in ROWS}
    assert {
        "deepspeed-zero2-accumulation",
        "ray-pack-order",
        "openrlhf-gloo-ignored",
        "rocm-tuple-index",
    } <= carried
    assert len(carried) == len(ROWS)


def read_log(log: Path) -> tuple[list[str], str]:
    """The ids of a log, and its text without the comments at its top.

    The first line says what the text was written after, the name of the file is the id of the first finding,
    and a line "# also: ID, ID" names further ones in their order.
    """
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    comments = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    assert comments, log
    also = [name for line in comments if line.startswith("# also: ") for name in line[8:].strip().split(", ")]
    first = [] if log.stem.startswith("healthy") else [log.stem.rpartition(".")[0]]
    return first + also, "".join(lines[len(comments) :])


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_a_log_is_explained_by_its_row_and_no_other(log: Path) -> None:
    expected, text = read_log(log)
    assert ids(known_bad.explain(ROWS, text)) == expected


def test_every_symptom_is_found_in_a_log_of_its_row() -> None:
    """The logs of the other rows are its negatives."""
    texts: dict[str, str] = {}
    for log in LOGS:
        names, text = read_log(log)
        texts |= {name: texts.get(name, "") + text for name in names[:1]}
    untested = [
        f"{found.id}: {pattern.pattern}"
        for found in ROWS
        for pattern in (*found.symptoms, *found.context)
        if not pattern.search(texts.get(found.id, ""))
    ]
    assert untested == []


NVLS = "node-a:2342:2382 [6] transport/nvls.cc:157 NCCL WARN Cuda failure 1 'invalid argument'\n"
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
DIED = "Worker exit type: SYSTEM_ERROR Worker exit detail: connection error code 2. End of file.\n"
NO_ROOM = "ValueError: No available memory for the cache blocks.\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OUT_OF_MEMORY + NO_ROOM, ["vllm-no-cache-memory", "gpu-out-of-memory"]),
        (NO_ROOM + OUT_OF_MEMORY, ["gpu-out-of-memory", "vllm-no-cache-memory"]),
        (NO_ROOM + OUT_OF_MEMORY + NO_ROOM, ["vllm-no-cache-memory", "gpu-out-of-memory"]),
        (OUT_OF_MEMORY + DIED, ["gpu-out-of-memory", "ray-worker-died"]),
        (
            NO_ROOM + "NCCL error: unhandled cuda error\n",
            ["vllm-no-cache-memory", "nccl-unhandled-cuda-error"],
        ),
        (NVLS + "NCCL error: unhandled cuda error\n", ["nccl-nvls-unified-group"]),
    ],
    ids=["nearer", "nearer again", "the last match", "a note", "a consequence", "instead of a general row"],
)
def test_the_likeliest_cause_comes_first(text: str, expected: list[str]) -> None:
    assert ids(known_bad.explain(ROWS, text)) == expected


def test_a_row_that_the_versions_confirm_comes_first() -> None:
    text = "'aimv2' is already used by a Transformers config\n" + NO_ROOM
    known = {"vllm": "0.9.2", "transformers": "4.55.0"}
    assert ids(known_bad.explain(ROWS, text)) == ["vllm-no-cache-memory", "vllm-0.9-aimv2"]
    assert ids(known_bad.explain(ROWS, text, known)) == ["vllm-0.9-aimv2", "vllm-no-cache-memory"]


def test_a_finding_has_the_number_of_its_line() -> None:
    text = "one\ntwo\n" + NO_ROOM + "four\nfive\n"
    assert known_bad.explain(ROWS, text)[0].line == 3
    assert known_bad.explain(ROWS, text, complete=False)[0].line == -3


def test_a_long_line_is_quoted_around_its_match() -> None:
    evidence = known_bad.explain(ROWS, "x" * 1000 + NO_ROOM)[0].evidence
    assert "No available memory for the cache blocks" in evidence
    assert len(evidence) <= 200


def test_the_last_error_of_an_unexplained_log_is_named() -> None:
    text = "AssertionError\nINFO ok\n\x1b[31mmypackage.errors.OddError: strange\x1b[0m\nbye\n"
    assert known_bad.explain(ROWS, text) == []
    assert known_bad.last_error(text) == known_bad.LastError(3, "mypackage.errors.OddError: strange", "")
    assert known_bad.last_error("INFO 0 errors\nall is well\n") is None


@pytest.mark.parametrize(
    "line",
    [
        "ray.exceptions.RayTaskError(OwnerDiedError): ray::main_task() (pid=1)",
        "(raylet) [2025-04-20 12:03:44,360 C 86 86] worker.cc:202:  Check failed: a == b",
        "node-a:77:120 [0] socket.cc:441 NCCL WARN something",
        "(EngineCore pid=4) ERROR 07-04 10:00:00 [core.py:1] something",
        "Segmentation fault (core dumped)",
        "Killed",
        "python: a.cpp:1: int f(): Assertion `a == b' failed.",
        "/nvshmem/src/modules/transport/ibrc/ibrc.cpp:418: non-zero status: 110 ibv_modify_qp failed",
        "/usr/bin/python3: No module named openrlhf.cli.train_ppo_ray",
        "python: can't open file '/job/train.py': [Errno 2] No such file or directory",
        "bash: line 1: nvcc: command not found",
        "/bin/sh: 1: nvcc: not found",
        "thread 'main' panicked at src/main.rs:2:5:",
        "thread '<unnamed>' (3124) panicked at src/lib.rs:7:1:",
        "Job entrypoint command failed with exit code 1",
        "Job 'raysubmit_kQx' failed",
        "(raylet) Worker exit type: SYSTEM_ERROR Worker exit detail: end of file",
    ],
)
def test_what_is_an_error(line: str) -> None:
    found = known_bad.last_error(f"first\n{line}\nlast\n")
    assert found
    assert (found.line, found.text) == (2, line)


SHELL = "run.sh: line 9: pkill: command not found\n"
FAILED = "Job 'raysubmit_kQx' failed\nJob entrypoint command failed with exit code 127\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("odd.OddError: a\n" + SHELL, "odd.OddError: a"),
        ("odd.OddError: a\n" + SHELL + FAILED, "odd.OddError: a"),
        (SHELL + "step 1\n" * 9, None),
        (SHELL + "step 1\nJob 'raysubmit_kQx' succeeded\n" + "\n-----" * 3, None),
        (SHELL + "step 1\n" * 9 + FAILED, SHELL.strip()),
        ("step 1\n" * 9 + SHELL, SHELL.strip()),
    ],
)
def test_a_program_that_a_shell_lacks_is_an_error_only_if_nothing_else_is_and_the_log_ends_there(
    text: str, error: str | None
) -> None:
    """A script's own messages, as of a trap, hid the error, and a run that lacked a tool was an error."""
    found = known_bad.last_error(text)
    assert (found and found.text) == error


TASK = "ray.exceptions.RayTaskError(OddError): ray::Actor.fit() (pid=12, ip=10.0.0.3, actor_id=1)\n"


@pytest.mark.parametrize(
    ("text", "error", "origin"),
    [
        ("odd.OddError: a\n" + TASK, "odd.OddError: a", ""),
        (TASK + '  File "x.py", line 3\nOddError: a\nbye\n', "OddError: a", "Actor.fit pid=12, ip=10.0.0.3"),
        ("AssertionError\n[rank3]: OddError: a\n", "[rank3]: OddError: a", "rank3"),
        ("(A pid=1) (B pid=2, ip=10.0.0.4) OddError: a\n", "", "B pid=2, ip=10.0.0.4"),
        ("AssertionError\n(raylet) Worker group failed: ERROR\n", "AssertionError", ""),
        ("AssertionError\n" + DIED + "Job 'a' failed\n", "AssertionError", ""),
        (
            "sh: x: command not found\nJob entrypoint command failed with exit code 127\n",
            "sh: x: command not found",
            "",
        ),
        ("AssertionError\nERROR 07-04 10:00:00 [core.py:1]   File x\n", "AssertionError", ""),
        ("AssertionError\nERROR 07-04 10:00:00 [core.py:1]\n", "AssertionError", ""),
        (
            "ray.exceptions.ActorDiedError: The actor died\n",
            "ray.exceptions.ActorDiedError: The actor died",
            "",
        ),
    ],
    ids=[
        "passed on",
        "in an actor",
        "rank",
        "engine",
        "without a message",
        "the end of a job",
        "a command",
        "a frame",
        "an empty line",
        "only passed on",
    ],
)
def test_the_last_error_is_that_of_the_process_that_failed(text: str, error: str, origin: str) -> None:
    found = known_bad.last_error(text)
    assert found
    assert (found.text, found.origin) == (error or text.strip(), origin)


REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused\n"


@pytest.mark.parametrize(
    ("text", "severities"),
    [
        (REFUSED, ["error"]),
        (REFUSED + "odd.OddError: a\n", ["note"]),
        (REFUSED + DIED, ["error", "note"]),
        (NO_ROOM + "odd.OddError: a\n", ["error"]),
    ],
    ids=["the last error", "before an unknown one", "before a known one", "a cause"],
)
def test_a_consequence_before_an_unknown_error_is_a_note(text: str, severities: list[str]) -> None:
    assert [one.severity for one in known_bad.explain(ROWS, text)] == severities


RETRIED = [
    "WARNING: 429 Client Error: Too Many Requests for url: https://huggingface.co/x, retrying in 5 s\n",
    "Retrying (Retry(total=2)) after connection broken by 'X: [Errno 111] Connection refused': /api\n",
    "Failed to bind to address 0.0.0.0:8265: Address already in use, trying port 8266\n",
    "torch.OutOfMemoryError: CUDA out of memory. Retrying with batch size 4\n",
    "'(ReadTimeoutError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.\"), "
    "'(Request ID: 1)')' thrown while requesting GET https://huggingface.co/x\nRetrying in 1s [Retry 1/5].\n",
]


@pytest.mark.parametrize("line", RETRIED)
def test_what_is_tried_again_is_a_note_if_no_error_follows(line: str) -> None:
    (found,) = known_bad.explain(ROWS, line + "Job 'x' succeeded\n")
    assert found.severity == "note"
    assert known_bad.last_error(line) is None
    (found, *_) = known_bad.explain(ROWS, NO_ROOM + line)
    assert (found.id, found.severity) == ("vllm-no-cache-memory", "error")
    found = next(one for one in known_bad.explain(ROWS, line + NO_ROOM) if one.id != "vllm-no-cache-memory")
    assert found.severity == "error"


WAITS = (
    "INFO 02-26 17:40:01 ray_utils.py:212] Waiting for creating a placement group of specs for 30 seconds.\n"
)
NO_GROUP = "ValueError: Cannot provide a placement group of placement_group_specs=[] within 1800 seconds.\n"
SUCCEEDED = "Job 'raysubmit_1' succeeded\n"


@pytest.mark.parametrize(
    ("text", "severities"),
    [
        (WAITS, ["warning"]),
        (WAITS + "step 1\n" + SUCCEEDED, ["note"]),
        (SUCCEEDED + WAITS, ["warning"]),
        (WAITS + "Job 'raysubmit_1' failed\n", ["warning", "note"]),
        (WAITS + NO_ROOM + SUCCEEDED, ["error", "warning"]),
        (WAITS + NO_GROUP + SUCCEEDED, ["warning"]),
    ],
    ids=["waits", "succeeded", "another job", "failed", "an error", "in vain"],
)
def test_what_a_job_waited_for_that_succeeded_is_a_note(text: str, severities: list[str]) -> None:
    assert [one.severity for one in known_bad.explain(ROWS, text)] == severities


@pytest.mark.parametrize(
    "line",
    [
        "INFO shm_broadcast.py:542] No available shared memory broadcast block found in 60 seconds.\n",
        "The following resource request cannot be scheduled right now: {'GPU': 1.0}.\n",
        "The client socket has failed to connect to [node1]:29500 (errno: 111 - Connection refused).\n",
        "wandb: Network error (ConnectTimeout), entering retry loop.\n",
    ],
)
def test_what_a_job_that_succeeded_overcame_is_a_note(line: str) -> None:
    (found,) = known_bad.explain(ROWS, line + "step 1\n" + SUCCEEDED)
    assert found.severity == "note"


@pytest.mark.parametrize(
    "line",
    [
        "BlockingIOError: [Errno 11] write could not complete without blocking\n",
        "warning: No `requires-python` value found in the workspace.\n",
    ],
)
def test_similar_messages_have_no_row(line: str) -> None:
    assert not {one.id for one in known_bad.explain(ROWS, line)} & {"process-limit", "python-too-old"}


def test_a_worker_that_a_job_lost_before_it_succeeded_is_no_error() -> None:
    assert known_bad.last_error(DIED + SUCCEEDED) is None
    assert known_bad.last_error(SUCCEEDED + DIED)
    assert known_bad.last_error("odd.OddError: a\n" + SUCCEEDED)


NO_SPACE, TOO_MANY = "No space left on device", "HTTPError: 429 Client Error: Too Many Requests for url: "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"NCCL WARN failed to extend /dev/shm/nccl-a to 9 bytes, error: {NO_SPACE} (28)", "shm-too-small"),
        (f"Call to posix_fallocate failed : {NO_SPACE}", "shm-too-small"),
        (f"OSError: [Errno 28] {NO_SPACE}: '/dev/shm/tmpabc'", "shm-too-small"),
        (f"RuntimeError: unable to write to file </torch_8_3124_1>: {NO_SPACE} (28)", "shm-too-small"),
        (f"cp: error writing '/dev/shm/model.pt': {NO_SPACE}", "shm-too-small"),
        (f"OSError: [Errno 28] {NO_SPACE}: '/ckpt/shm/model.pt'", "disk-full"),
        (f"cp: error writing '/ckpt/model.pt': {NO_SPACE}", "disk-full"),
        (TOO_MANY + "https://cdn-lfs.hf.co/x", "hub-rate-limit"),
        (TOO_MANY + "http://judge.local:8000/score", "server-rate-limit"),
        (TOO_MANY + "https://notgithub.com/x", "server-rate-limit"),
        (TOO_MANY + "http://judge/?model=hf.co/x", "server-rate-limit"),
    ],
)
def test_the_path_or_address_tells_similar_messages_apart(line: str, expected: str) -> None:
    assert ids(known_bad.explain(ROWS, f"{line}\n")) == [expected]


def test_the_end_of_a_long_match_is_quoted() -> None:
    text = "(A pid=7) " + "x" * 500 + " No space left on device: '/ckpt'\n"
    assert "No space left on device" in known_bad.explain(ROWS, text)[0].evidence


def test_what_failed_in_the_end_is_no_note() -> None:
    """The last match outside of the lines about retries counts."""
    (found,) = known_bad.explain(ROWS, REFUSED + RETRIED[1])
    assert (found.line, found.severity) == (1, "error")
    (found,) = known_bad.explain(ROWS, "ValueError: gave up after retrying: Connection refused\n")
    assert found.severity == "error"


@pytest.mark.parametrize(
    "text",
    [
        "removed idle node; missed too many heartbeats: 0\n",
        "signals: SIGKILL: 0, SIGSEGV: 0\n",
        "Received and initiated operation=Connect res=0\n",
        'INFO HTTP Request: POST https://judge/v1 "HTTP/1.1 429 Too Many Requests"\n',
    ],
)
def test_harmless_lines_match_nothing(text: str) -> None:
    assert known_bad.explain(ROWS, text) == []
    assert known_bad.last_error(text) is None


def test_what_no_row_explains_is_named_as_the_last_error() -> None:
    """A defect of a program is not a setting that it refuses."""
    text = "AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet\n"
    assert known_bad.explain(ROWS, text) == []
    assert known_bad.last_error(text) == known_bad.LastError(1, text.strip(), "")


FINALIZER = (
    "{0}Exception ignored in: <function AsyncLLM.__del__ at 0x7f3d2c1b5ee0>\n"
    "{0}Traceback (most recent call last):\n"
    '{0}  File "/venv/vllm/v1/engine/async_llm.py", line 250, in __del__\n'
    "{0}    self.shutdown()\n"
    "{0}TypeError: 'NoneType' object is not callable\n"
)


@pytest.mark.parametrize("prefix", ["", "(LLMRayActor pid=7, ip=10.0.0.3) ", "[rank0]: "])
def test_an_exception_that_python_ignores_is_a_note_if_no_error_follows(prefix: str) -> None:
    """HiThink-Research/GAGE#138: it is printed after the run was written."""
    text = FINALIZER.format(prefix)
    (found,) = known_bad.explain(ROWS, text)
    assert (found.line, found.severity) == (5, "note")
    assert known_bad.last_error(text) is None
    assert known_bad.explain(ROWS, text + NO_ROOM)[0].id == "vllm-no-cache-memory"
    found = known_bad.explain(ROWS, text + "TypeError: 'NoneType' object is not callable\n")[0]
    assert (found.line, found.severity) == (6, "error")


def test_a_cause_that_python_ignores_is_an_error() -> None:
    log = Path(__file__).with_name("logs") / "shm-removed-at-logout.1.log"
    assert [one.severity for one in known_bad.explain(ROWS, read_log(log)[1])] == ["error"]


@pytest.mark.parametrize(
    "head", ["(raylet) [2026-03-03 13:07:48,113 E 52 52] main.cc:1032: ", '(A pid=1) {"levelname":"E",']
)
def test_metrics_that_ray_does_not_export_are_no_error(head: str) -> None:
    """ray-project/ray#59665, NovaSky-AI/SkyRL#1103."""
    line = head + (
        "Failed to establish connection to the metrics exporter agent. Metrics will not be exported. "
        "Exporter agent status: RpcError: Running out of retries to initialize the metrics agent.\n"
    )
    assert known_bad.explain(ROWS, line) == []
    assert known_bad.last_error(line) is None


UNSUPPORTED = "ValueError: a is not supported with b\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (UNSUPPORTED, ["combination-refused"]),
        ("NotImplementedError: not supported with b\n" + UNSUPPORTED, ["combination-refused"]),
        (NO_ROOM + UNSUPPORTED, ["vllm-no-cache-memory", "combination-refused"]),
        ("ValueError: No available memory for the cache blocks: not supported\n", ["vllm-no-cache-memory"]),
        ("RuntimeError: odd\n", []),
    ],
    ids=["alone", "two of one line", "of another line", "of the line of another row", "neither"],
)
def test_a_general_row_is_omitted_if_another_matches_its_line(text: str, expected: list[str]) -> None:
    assert ids(known_bad.explain(ROWS, text)) == expected


def test_the_evidence_is_the_line_of_the_error() -> None:
    text = "before\n  \x1b[31mRuntimeError: Device string must not be empty\x1b[0m\nafter\n"
    assert known_bad.explain(ROWS, text)[0].evidence == "RuntimeError: Device string must not be empty"


def test_rows_that_the_versions_exclude_are_omitted() -> None:
    text = "ValueError: 'aimv2' is already used by a Transformers config, pick another name."
    assert ids(known_bad.explain(ROWS, text, {"vllm": "0.9.2"})) == ["vllm-0.9-aimv2"]
    assert known_bad.explain(ROWS, text, {"vllm": "0.11.0"}) == []


def versions_of(cell: Cell) -> dict[str, str]:
    """Return what a lock pins; without one, what that of the stand-in does, and what the cell has instead."""
    if lockfile.path(cell).exists():
        return known_bad.freeze(lockfile.path(cell).read_text(encoding="utf-8"))
    lock = lockfile.path(find(load(), cell.id + STAND_IN)).read_text(encoding="utf-8")
    declared = [one.requirement for one in cell.packages] + [one.requirement for one in cell.requirements]
    own = known_bad.freeze("\n".join(declared))
    recipes = {build.recipe: "1" for build in cell.build_from_source if build.recipe}
    excluded = {one.name for one in cell.excluded}
    return {name: of for name, of in known_bad.freeze(lock).items() if name not in excluded} | own | recipes


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_our_own_cells_have_no_error(cell: Cell) -> None:
    """The cells are judged as shipped: by lock, env defaults and patches."""
    present = names_of(series_of(cell))
    environment = Environment(
        versions_of(cell) | {"python": cell.python},
        {setting.name: setting.value for setting in cell.env},
        cell.accelerator.kind,
        present,
    )
    found = [finding for finding in known_bad.judge(ROWS, environment) if finding.severity != "note"]
    assert found == []


def test_the_patches_that_fix_a_row_exist() -> None:
    names = names_of(load_all())
    for found in ROWS:
        assert set(found.fixed_by) <= names, found.id


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        ("deepspeed==0.18.1\n", ["deepspeed-zero2-accumulation", "deepspeed-muon-rate"]),
        ("openrlhf==0.9.0\n", ["openrlhf-0.9.0-yanked", "openrlhf-gloo-ignored"]),
        (
            "ray @ file:///wheels/ray-2.41.0-cp311-cp311-manylinux2014_x86_64.whl\nvllm==0.7.0\n",
            ["vllm-v1-ray-2.41", "vllm-sleep-level-2"],
        ),
        ("flashinfer-python==0.6.14\nflashinfer_cubin==0.6.13\n", ["flashinfer-cubin-version"]),
        ("numpy==2.0.1\nvllm==0.4.2+stack.1\n", ["numpy-2-with-vllm-0.4.2"]),
        ("requests==2.32.0\n-e git+https://host/x.git#egg=x\n# ray==2.44.0\n", []),
    ],
    ids=["deepspeed", "openrlhf", "a wheel's address", "two that differ", "local version", "nothing"],
)
def test_a_freeze_is_judged(freeze: str, expected: list[str]) -> None:
    versions = known_bad.freeze(freeze)
    assert ids(known_bad.judge(ROWS, Environment(versions, None, "cuda"))) == expected


@pytest.mark.parametrize(
    ("condition", "value", "holds"),
    [
        ("set", "0", True),
        ("set", None, False),
        ("unset", None, True),
        ("unset", "", False),
        ("=0", "0", True),
        ("=0", "00", False),
        ("=0", None, False),
        ("!=0", None, True),
        ("!=0", "0", False),
        ("~segments:True", "a:1,expandable_segments:True", True),
        ("~segments:True", None, False),
    ],
)
def test_conditions_on_a_variable(condition: str, value: str | None, holds: bool) -> None:
    variables = {} if value is None else {"NAME": value}
    found = known_bad.judge([row(variables={"NAME": condition})], Environment({"pkg": "1.5"}, variables))
    assert bool(found) == holds


def test_without_a_process_no_condition_on_a_variable_holds() -> None:
    assert known_bad.judge([row(variables={"NAME": "unset"})], Environment({"pkg": "1.5"}, None)) == []


def test_a_row_is_fixed_only_by_all_its_patches() -> None:
    fixed = row(fixed_by=("a", "b"))
    assert known_bad.judge([fixed], Environment({"pkg": "1"}, {}, None, {"a", "b", "c"})) == []
    assert ids(known_bad.judge([fixed], Environment({"pkg": "1"}, {}, None, {"a"}))) == ["a-row"]


def test_a_row_holds_only_without_the_packages_that_must_be_absent() -> None:
    without = row(absent=frozenset({"other"}))
    assert ids(known_bad.judge([without], Environment({"pkg": "1"}))) == ["a-row"]
    assert known_bad.judge([without], Environment({"pkg": "1", "Other": "2"})) == []


def test_an_unchecked_condition_makes_an_error_a_warning() -> None:
    conditional = row(when="the moon is full")
    assert known_bad.judge([conditional], Environment({"pkg": "1"}))[0].severity == "warning"


@given(st.integers(0, 3), st.integers(0, 9), st.sampled_from(["", "+stack.1", "+cu121", ".post1"]))
def test_a_row_holds_exactly_within_its_versions(major: int, minor: int, suffix: str) -> None:
    version = f"{major}.{minor}{suffix}"
    found = known_bad.judge([row()], Environment({"PKG": version}))
    assert bool(found) == (major == 1)


@given(st.text(max_size=400))
def test_any_text_can_be_a_log_or_a_freeze(text: str) -> None:
    known_bad.explain(ROWS, text)
    known_bad.judge(ROWS, Environment(known_bad.freeze(text), {}, None))


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('kind = "crash"', 'kind = "crush"', "crush"),
        ('id = "a-row"', 'id = "A row"', "lower-case"),
        ('sources = ["here"]', "sources = []", "needs a source"),
        ('symptoms = ["some text"]', 'symptoms = []\nno_symptom = "silent"', "needs a condition"),
        ('symptoms = ["some text"]', 'symptoms = []\npackages = { a = ">1" }', "no_symptom, the reason"),
        ('shown = "run"', 'shown = "run"\nno_symptom = "silent"', "no_symptom, the reason"),
        ('symptoms = ["some text"]', 'symptoms = ["("]', "parenthesis|unterminated"),
        ('symptoms = ["some text"]', 'symptoms = [".*"]', "every text"),
        ('title = "t"', 'titel = "t"', "missing.*title.*unknown.*titel"),
        ('shown = "run"', 'shown = "run"\npackages = { ray = "2.44" }', "not a version specifier"),
        ('shown = "run"', 'shown = "run"\nvariables = { A = "maybe" }', "condition"),
        ('shown = "run"', 'shown = "run"\ndiffer = ["a"]', "two names"),
        (
            'symptoms = ["some text"]',
            'symptoms = []\nno_symptom = "silent"\npackages = { a = ">1" }\ngeneral = true',
            "without symptoms",
        ),
    ],
)
def test_an_invalid_row_is_named(before: str, after: str, what: str) -> None:
    with pytest.raises(MalformedRow, match=what) as raised:
        list(read(MINIMAL.replace(before, after)))
    assert re.search("a-row|A row", str(raised.value))


def test_the_accelerator_follows_torch() -> None:
    assert known_bad.accelerator_of({"torch": "2.4.0+rocm6.1"}) == "rocm"
    assert known_bad.accelerator_of({"torch": "2.13.0+cpu"}) == "cpu"
    assert known_bad.accelerator_of({"torch": "2.3.0"}) == "cuda"
    assert known_bad.accelerator_of({}) is None
