"""The moving average of the weights, with objects in place of tensors; the probes use torch and DeepSpeed."""

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.openrlhf import moving_average
from rlhf_stack.openrlhf.moving_average import average_weights


class Tensor:
    """One number, rounded to ``digits``."""

    def __init__(self, value: float, digits: int = 2, shape: tuple[int, ...] = (1,)) -> None:
        self.value, self.digits, self.shape = round(value, digits), digits, shape

    def to(self, kind: Any, copy: bool = False) -> "Tensor":
        return Tensor(self.value, 9, self.shape) if copy else self

    def lerp_(self, end: "Tensor", weight: float) -> None:
        self.value = round(self.value + weight * (end.value - self.value), self.digits)

    def copy_(self, source: "Tensor") -> None:
        self.value = round(source.value, self.digits)

    def float(self) -> "Tensor":
        return Tensor(self.value, 9, self.shape)


def model(*parameters: Any) -> Any:
    return SimpleNamespace(parameters=lambda: iter(parameters))


def whole(value: float, trained: bool = True, **given: Any) -> Any:
    return SimpleNamespace(data=Tensor(value, **given), requires_grad=trained)


def sharded(value: float, events: list[str], **given: Any) -> Any:
    shard = Tensor(value, **given)
    return SimpleNamespace(
        data=None, ds_tensor=shard, requires_grad=True, partition=lambda: events.append("partitioned")
    )


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_average, "torch", SimpleNamespace(float32="float32"))


def test_changes_below_the_precision_of_the_weights_add_up() -> None:
    average, trained = model(average_weight := whole(1.0)), model(whole(1.2))
    for _ in range(500):
        average_weights(trained, average, 0.992)
    assert average_weight.data.value == 1.2
    assert next(iter(vars(average)[moving_average.AVERAGES].values())).value == pytest.approx(
        1.1964, abs=1e-4
    )


def test_a_frozen_weight_stays() -> None:
    kept = whole(1.0)
    average_weights(model(whole(2.0, trained=False)), model(kept), 0.5)
    assert kept.data.value == 1.0


def test_at_stage_3_the_shard_is_averaged_and_a_gathered_copy_discarded() -> None:
    events: list[str] = []
    kept = sharded(1.0, events)
    average_weights(model(sharded(2.0, [])), model(kept), 0.5)
    assert kept.ds_tensor.value == 1.5
    assert events == ["partitioned"]


def test_models_with_other_weights_are_refused() -> None:
    """With LoRA the trained model has more: OpenRLHF averaged each with an unrelated one."""
    with pytest.raises(
        RuntimeError, match="cannot average 2 weights in a model with 1: it does not support LoRA"
    ):
        average_weights(model(whole(1.0), whole(1.0)), model(whole(1.0)), 0.9)
    with pytest.raises(RuntimeError, match=r"of the shape \(4,\) on this rank in one of \(2,\)"):
        average_weights(model(sharded(1.0, [], shape=(4,))), model(sharded(1.0, [], shape=(2,))), 0.9)
