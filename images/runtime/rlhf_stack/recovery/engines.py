"""The command line of a run with fewer engines, for a cluster that has lost a node."""

from collections.abc import Iterator, Sequence

from rlhf_stack.openrlhf.run_spec import Run

COUNT_FLAGS = ("--vllm.num_engines", "--vllm_num_engines")


def with_fewer_engines(words: Sequence[str], run: Run) -> Iterator[list[str]]:
    """Yield ``words`` with fewer engines, most first; nothing if engines share the trainer's GPUs.

    The trainer keeps its ranks: DeepSpeed's checkpoint is for their number.
    """
    engines = run.request.engines
    if engines is None or engines.shares:
        return
    for count in range(engines.count - 1, 0, -1):
        changed = list(words)
        for index, word in enumerate(words):
            flag, equals, _ = word.partition("=")
            if flag in COUNT_FLAGS:
                if equals:
                    changed[index] = f"{flag}={count}"
                else:
                    changed[index + 1] = str(count)
        yield changed
