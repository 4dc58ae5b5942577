"""Outcomes of sources, from the log of a build that did not compile all of them."""

from scripts.hip import sources
from scripts.testing.records import FAILED, PASSED, SKIPPED

LOG = """#9 [vllm-source 1/1] RUN /opt/tools/build-source /wheels
#9 12.1 CMakeFiles/_C.dir/csrc/one.hip.o
#9 12.1 CMakeFiles/_C.dir/csrc/two.hip.o
#9 12.1 CMakeFiles/_C.dir/csrc/torch_bindings.cpp.o
#9 12.1 CMakeFiles/_rocm_C.dir/csrc/rocm/attention.hip.o
#9 20.0 [1/5] Building HIP object CMakeFiles/_C.dir/csrc/one.hip.o
#9 20.0 /src/one.hip:3:1: warning: an error: of another kind [-Wother]
#9 31.5 [2/5] Building HIP object CMakeFiles/_C.dir/csrc/two.hip.o
#9 31.5 FAILED: [code=1] CMakeFiles/_C.dir/csrc/two.hip.o
#9 31.5 nice -n 19 clang++ -o two.hip.o
#9 31.5 /src/csrc/two.hip:7:12: fatal error: 'cub/cub.cuh' file not found
#9 31.5 /src/csrc/two.hip:9:12: error: a later one
#9 31.9 FAILED: CMakeFiles/_C.dir/csrc/torch_bindings.cpp.o
#9 31.9 Killed
"""


def test_each_source_has_the_outcome_and_the_first_error_of_its_own() -> None:
    assert sources.outcomes(LOG, "not compiled within 15 minutes") == {
        "csrc/one.hip": (PASSED, ""),
        "csrc/two.hip": (FAILED, "two.hip:7:12: fatal error: 'cub/cub.cuh' file not found"),
        "csrc/torch_bindings.cpp": (FAILED, "the compiler printed no error"),
        "csrc/rocm/attention.hip": (SKIPPED, "not compiled within 15 minutes"),
    }
    assert sources.outcomes("#9 0.1 error: cannot download vllm==0.29.0", "") == {}
