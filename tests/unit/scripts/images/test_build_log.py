"""What is read from BuildKit's plain progress."""

from scripts.images.build_log import Stage, cause, stages

LOG = """#1 [internal] load build definition from Dockerfile
#1 DONE 0.1s
#12 [torch 1/1] RUN --mount=type=bind,source=tools /opt/tools/install-layer
#12 sha256:605f26a3878682c976ea91cdd55d2d3564fcae82c7e3005f5d7a53ddba0f5163
#12 0.430 Resolved 12 packages in 77ms
#12 DONE 8.8s
#13 [vllm 1/1] RUN --mount=type=bind,source=tools /opt/tools/install-layer
#13 CACHED
#15 [openrlhf-source 1/1] RUN /opt/tools/build-source /wheels
#15 0.430 /opt/venv/bin/python3: No module named pip
#15 ERROR: executor failed running [/bin/sh -euc /opt/tools/build-source /wheels]: exit code: 1
------
 > [openrlhf-source 1/1] RUN /opt/tools/build-source /wheels:
------
executor failed running [/bin/sh -euc /opt/tools/build-source /wheels]: exit code: 1
"""


def test_stages_begin_and_end() -> None:
    """Stages are those of the Dockerfile, without BuildKit's own steps."""
    assert list(stages(LOG.splitlines())) == [
        Stage("torch"),
        Stage("torch", 8.8),
        Stage("vllm"),
        Stage("vllm", 0.0),
        Stage("openrlhf-source"),
    ]


def test_cause_is_from_the_failed_step() -> None:
    """The cause is the step's own output, not BuildKit's message about it."""
    assert cause(LOG) == "/opt/venv/bin/python3: No module named pip"


def test_cause_prefers_an_error_line() -> None:
    """pip reports a hash that does not match in the middle of its output."""
    log = LOG.replace("No module named pip", "x\n#15 0.5 Hash mismatch for torch\n#15 0.6 see above")
    assert cause(log) == "Hash mismatch for torch"


def test_cause_of_a_step_that_printed_none_is_the_builders() -> None:
    """An image that does not exist, and a process that was killed for its memory."""
    load = "#2 [internal] load metadata for docker.io/base:1\n#2 ERROR: docker.io/base:1: not found\n"
    assert cause(load) == "docker.io/base:1: not found"
    assert cause(LOG.replace("exit code: 1", "exit code: 137")).endswith("exit code: 137")


def test_cause_before_any_step_is_the_last_line() -> None:
    """Docker refused, or the command line is wrong."""
    assert cause("invalid argument\n") == "invalid argument"
    assert cause("") == "the builder printed no output"
