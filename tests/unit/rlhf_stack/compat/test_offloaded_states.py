"""Host copies of optimizer states after a checkpoint was loaded."""

from types import SimpleNamespace

from rlhf_stack.compat import offloaded_states


def test_only_copies_on_a_gpu_are_removed() -> None:
    def on(kind: str) -> SimpleNamespace:
        return SimpleNamespace(device=SimpleNamespace(type=kind))

    loaded = {"step": on("cpu"), "exp_avg": on("cuda"), "exp_avg_offload_buffer": on("cuda")}
    made_here = {"exp_avg": on("cuda"), "exp_avg_offload_buffer": on("cpu")}
    optimizer = SimpleNamespace(state={"a": loaded, "b": made_here})
    offloaded_states.drop_loaded_copies(optimizer)
    assert list(loaded) == ["step", "exp_avg"]
    assert list(made_here) == ["exp_avg", "exp_avg_offload_buffer"]
