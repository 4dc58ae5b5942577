"""rlhf_stack.recovery.supervisor: the loop, on a cluster made of lists."""

import errno
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.memory import Zero
from rlhf_stack.openrlhf.run_spec import Role
from rlhf_stack.placement.model import Engines, Group, Request
from rlhf_stack.recovery import supervisor
from rlhf_stack.recovery.job import Ended, HeadLostError, HeadSilentError
from rlhf_stack.recovery.nodes import Nodes
from rlhf_stack.recovery.supervisor import (
    GivenUpError,
    Limits,
    State,
    Supervisor,
    TakenOverError,
    read_state,
)
from rlhf_stack.telemetry import run_log

if TYPE_CHECKING:
    from rlhf_stack.recovery.checkpoints import Checkpoints


def nodes(answering: str, silent: str = "") -> Nodes:
    """Nodes whose addresses are letters, and so are their ids: an upper one after the node was restarted."""
    return Nodes({address.lower(): f"id {address}" for address in answering}, tuple(silent))


ALL = nodes("abc")
DEAD = "PeerError: rank 1 is dead"
WORDS = ["train", "--vllm.num_engines", "2"]
RANKS = [*WORDS, "--actor.num_nodes", "3"]
UNIVERSAL = "--ds.use_universal_ckpt"


class Saved:
    """The checkpoints of a run: one after each attempt, at the next of ``steps``."""

    loads, every, load_flag, universal = False, 1, "--load", False

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = list(steps)
        self.selected: list[int] = []
        self.converted: list[int] = []

    def complete_steps(self, since: float, loaded: int) -> set[int]:
        return {self.steps.pop(0)} - {0}

    def select(self, step: int, since: float, loaded: int) -> list[Path]:
        self.selected.append(step)
        return []

    def convert(self, step: int, since: float, loaded: int) -> None:
        self.converted.append(step)


class Faulty:
    """A cluster whose jobs end as ``ends`` lists, and whose nodes are the next of ``views``."""

    def __init__(self, ends: Sequence[str], views: Sequence[Nodes | str] = (ALL,), needs: int = 3) -> None:
        self._ends, self._views, self._needs = list(ends), list(views), needs
        self.submitted: list[tuple[list[str], list[str]]] = []
        self.remembered: list[dict[str, Any]] = []
        self._now: Nodes = ALL

    refusal = ""  # of fewer ranks, whatever nodes there are

    def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
        """Two engines need all nodes, one needs one node less."""
        if self.refusal and "--actor.num_nodes" in words and "3" not in words:
            return [self.refusal]
        usable = set(self._now.answering) - set(excluded)
        ranks = int(words[words.index("--actor.num_nodes") + 1]) if "--actor.num_nodes" in words else 0
        fits = len(usable) >= self._needs + ranks - (words[2] == "1")
        return [] if fits else ["a GPU is missing"]

    def submit(self, job: str, words: Sequence[str], excluded: Sequence[str]) -> None:
        assert self.remembered[-1]["job"] == job, "it would be unknown after an error or a signal"
        self.submitted.append((list(words), list(excluded)))

    def follow(self, job: str, write: Callable[[str], None]) -> Ended:
        end = self._ends.pop(0)
        if end == "head":
            raise HeadLostError("the head was lost")
        if end == "silent":
            raise HeadSilentError("the head does not answer")
        write(f"line\n{'' if end == 'ok' else end}\n")
        status = {"ok": "SUCCEEDED", "stopped": "STOPPED"}.get(end, "FAILED")
        return Ended(job, status, int(end != "ok"))

    def clean(self) -> Nodes:
        view = self._views.pop(0) if len(self._views) > 1 else self._views[0]
        if isinstance(view, str):
            raise UserError(view)
        self._now = view
        return view

    def known_causes(self, output: str) -> list[str]:
        return ["known. remedy"] if "known cause" in output else []

    def remember(self, state: dict[str, Any]) -> None:
        self.remembered.append(json.loads(json.dumps(state)))

    def recall(self) -> dict[str, Any] | None:
        return self.remembered[-1] if self.remembered else None


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `time.sleep` advance the clock instead of waiting, and number the jobs."""
    now, numbers = [0.0], itertools.count(1)
    monkeypatch.setattr(supervisor, "new_id", lambda: f"job{next(numbers)}")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(
        supervisor, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=lambda: now[0])
    )


def supervise(
    cluster: Faulty,
    steps: Sequence[int],
    limits: Limits,
    state: State | None = None,
    selected: list[int] | None = None,
    **changed: Any,
) -> tuple[Ended, State, Saved]:
    """Supervise a run; the steps that are selected are also in ``selected`` after an error."""
    saved: Any = Saved(steps)
    saved.selected = saved.selected if selected is None else selected

    def describe(words: Sequence[str]) -> tuple[Any, Any]:
        nodes = int(words[words.index("--actor.num_nodes") + 1]) if "--actor.num_nodes" in words else 1
        request = Request((Group("actor", nodes, 1),), Engines(2, 1))
        role = Role("actor", "actor", nodes, "", True, False)
        saved.universal = UNIVERSAL in words
        values = {"flat": False, "zero": Zero(2, 1), "tensor_parallel": 1} | changed
        return SimpleNamespace(request=request, roles=(role,), **values), saved

    one = Supervisor(cluster, describe, limits, state or State(list(WORDS), 1.0), lambda _: None)
    return one.supervise(), one.state, saved


def test_a_run_without_a_fault_is_submitted_once() -> None:
    cluster = Faulty(["ok"])
    ended, state, _ = supervise(cluster, [9], Limits(3))
    assert (ended.status, len(state.attempts)) == ("SUCCEEDED", 1)
    assert cluster.submitted == [(WORDS, [])]


def test_after_a_fault_the_run_continues_from_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Faulty([DEAD, "ok"])
    ended, state, saved = supervise(cluster, [4, 9], Limits(3))
    assert capsys.readouterr().out == "", "the standard output is that of the job, or JSON"
    assert ended.code == 0
    assert [words for words, _ in cluster.submitted] == [WORDS, [*WORDS, "--load"]]
    assert saved.selected == [4]
    assert [(one.resumed, one.saved, one.error) for one in state.attempts] == [(0, 4, DEAD), (4, 9, "")]


def test_the_job_server_of_a_restarted_head_takes_jobs_later_than_it_answers() -> None:
    class Starting(Faulty):
        refusals = 2

        def submit(self, job: str, words: Sequence[str], excluded: Sequence[str]) -> None:
            if self.submitted and self.refusals:
                self.refusals -= 1
                raise UserError("No available agent to submit job")
            super().submit(job, words, excluded)

    cluster = Starting(["head", "ok"])
    ended, _, saved = supervise(cluster, [4, 9], Limits(3))
    assert (ended.status, cluster.refusals) == ("SUCCEEDED", 0)
    assert saved.selected == [4, 4], "and what ranks wrote until they were removed is set aside"
    cluster.submitted, cluster.refusals, cluster.remembered = [(WORDS, [])], 10**6, []
    with pytest.raises(UserError, match="No available agent"):
        supervise(cluster, [4], Limits(3))


def test_what_a_lost_head_s_ranks_wrote_is_set_aside_before_it_could_be_an_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Ordered(Faulty):
        def clean(self) -> Nodes:
            order.append("removed")
            return super().clean()

        def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
            order.append("looked")
            return super().problems(words, excluded, scales)

    def select(self: Saved, step: int, since: float, loaded: int) -> list[Path]:
        order.append(f"selected {step}")
        return []

    monkeypatch.setattr(Saved, "select", select)
    supervise(Ordered(["head", "ok"]), [4, 9], Limits(3))
    assert order[-4:] == ["selected 4", "removed", "selected 4", "looked"]


def test_without_a_checkpoint_the_run_begins_again() -> None:
    cluster = Faulty([DEAD, "ok"])
    _, _, saved = supervise(cluster, [0, 9], Limits(3))
    assert [words for words, _ in cluster.submitted] == [WORDS, WORDS]
    assert saved.selected == []


def test_a_universal_checkpoint_is_loaded_until_the_run_has_saved_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Saved, "loads", True)
    words, cluster = [*WORDS, "--load", UNIVERSAL], Faulty([DEAD, "OSError: other", "ok"])
    _, _, saved = supervise(cluster, [0, 5, 9], Limits(3), State(list(words), 0.0))
    assert [one for one, _ in cluster.submitted] == [words, words, [*WORDS, "--load"]]
    assert saved.selected == [5], "the folder of the universal checkpoint was set aside"


def test_the_flag_that_loads_is_added_once() -> None:
    cluster = Faulty([DEAD, "OSError: other", "ok"])
    supervise(cluster, [4, 5, 9], Limits(3))
    assert cluster.submitted[2][0] == [*WORDS, "--load"]


def test_a_lost_node_is_awaited() -> None:
    lost, silent = nodes("ab"), nodes("ab", silent="c")
    cluster = Faulty([DEAD, "ok"], [ALL, lost, silent, lost, ALL])
    _, state, _ = supervise(cluster, [4, 9], Limits(3))
    assert state.attempts[0].lost == ("c",)
    assert cluster.submitted[1][0] == [*WORDS, "--load"]
    assert list(state.nodes) == ["a", "b", "c"]


def test_fewer_engines_are_used_when_a_node_stays_lost_and_that_is_allowed() -> None:
    cluster = Faulty([DEAD, "ok"], [ALL, nodes("ab")])
    _, state, _ = supervise(cluster, [4, 9], Limits(3, min_nodes=2))
    assert cluster.submitted[1][0] == ["train", "--vllm.num_engines", "1", "--load"]
    assert list(state.nodes) == ["a", "b"]


def test_fewer_ranks_load_a_converted_checkpoint_until_they_have_saved_their_own() -> None:
    """Three ranks and two engines on five nodes, of which two are lost for good, and then another one."""
    five, three, two = (nodes("abcde"[:count]) for count in (5, 3, 2))
    cluster = Faulty([DEAD, DEAD, "OSError: x", "ok"], [five, *[three] * 5, two], needs=2)
    limits, state = Limits(3, min_nodes=2, seconds=0.0), State(list(RANKS), 1.0)
    _, _, saved = supervise(cluster, [4, 0, 7, 9], limits, state)

    def words(ranks: int) -> list[str]:
        return ["train", "--vllm.num_engines", "1", "--actor.num_nodes", str(ranks), "--load", UNIVERSAL]

    assert [one for one, _ in cluster.submitted] == [RANKS, words(2), words(2), words(1)]
    assert saved.converted == [4, 7]
    assert saved.selected == [4, 4, 7]
    assert [(one.resumed, one.saved) for one in state.attempts] == [(0, 4), (4, 4), (4, 7), (7, 9)]


def test_their_own_checkpoint_is_not_universal() -> None:
    cluster = Faulty([DEAD, "OSError: x", "ok"], [nodes("abcde"), nodes("abc")], needs=2)
    _, _, saved = supervise(cluster, [4, 7, 9], Limits(3, min_nodes=2, seconds=0.0), State(list(RANKS), 1.0))
    second, third = (words for words, _ in cluster.submitted[1:])
    assert third == [word for word in second if word != UNIVERSAL]
    assert saved.converted == [4]


def test_fewer_ranks_begin_again_if_there_is_no_checkpoint() -> None:
    cluster = Faulty([DEAD, "ok"], [nodes("abcde"), nodes("abc")], needs=2)
    _, _, saved = supervise(cluster, [0, 9], Limits(3, min_nodes=2), State(list(RANKS), 1.0))
    assert cluster.submitted[1][0] == ["train", "--vllm.num_engines", "1", "--actor.num_nodes", "2"]
    assert saved.converted == []


@pytest.mark.parametrize("least", [None, 3])
def test_a_run_that_cannot_be_placed_is_given_up_with_the_reason(least: int | None) -> None:
    cluster = Faulty([DEAD], [ALL, nodes("ab")])
    with pytest.raises(GivenUpError, match=r"after 60 s on 2 nodes \(a, b\): a GPU is missing"):
        supervise(cluster, [4], Limits(3, least, seconds=60.0))


@pytest.mark.parametrize(
    ("least", "changed", "reason"),
    [
        (None, {}, "--min-nodes is not given"),
        (3, {}, "--min-nodes is 3"),
        (1, {"flat": True, "release": "0.5.1"}, "OpenRLHF 0.5.1 loads no checkpoint of another number"),
        (1, {"tensor_parallel": 2}, "a checkpoint of DeepSpeed's tensor parallelism is loaded by the same"),
        (1, {"zero": Zero(0, 1)}, "with ZeRO stage 0 a checkpoint cannot be converted"),
        (1, {}, "actor.num_nodes 3 to 2: DeepSpeed refuses a batch of 8"),
    ],
)
def test_the_error_has_the_reason_why_no_smaller_layout_is_used(
    least: int | None, changed: dict[str, Any], reason: str
) -> None:
    cluster = Faulty([DEAD], [nodes("abcde"), nodes("ab")], needs=2)
    cluster.refusal = "DeepSpeed refuses a batch of 8: it must be a multiple of 3"
    with pytest.raises(
        GivenUpError, match=f"a GPU is missing\n  no smaller layout is used: .*{reason}"
    ) as found:
        supervise(cluster, [4], Limits(3, least, seconds=0.0), State(list(RANKS), 1.0), **changed)
    assert str(found.value).count("num_nodes 3 to ") <= 2, "each reason once, also with fewer engines"
    assert ("vllm.num_engines 2 to 1: a GPU is missing" in str(found.value)) == (least == 1)


def test_a_smaller_layout_whose_numbers_contradict_each_other_is_passed_over() -> None:
    """As ranks that --ds.zpg does not divide: the error ended the supervision."""

    class Undivided(Faulty):
        def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
            if words[words.index("--actor.num_nodes") + 1] == "2":
                raise UserError("actor has 2 ranks, which must be a multiple of 3")
            return super().problems(words, excluded, scales)

    cluster = Undivided([DEAD, "ok"], [nodes("abcde"), nodes("ab")], needs=2)
    supervise(cluster, [4, 9], Limits(3, min_nodes=1, seconds=0.0), State(list(RANKS), 1.0))
    assert cluster.submitted[1][0][:5] == ["train", "--vllm.num_engines", "1", "--actor.num_nodes", "1"]


def test_an_attempt_records_what_has_changed_and_how_long_the_run_waited() -> None:
    five, three = (nodes("abcde"[:count]) for count in (5, 3))
    cluster = Faulty([DEAD, DEAD, "ok"], [five, *[three] * 100], needs=2)
    limits, state = Limits(3, min_nodes=2, seconds=60.0), State(list(RANKS), 1.0)
    _, state, _ = supervise(cluster, [4, 5, 9], limits, state)
    first, second, third = state.attempts
    layout = ("vllm.num_engines 2 to 1", "actor.num_nodes 3 to 2")
    assert (first.changed, first.waited) == ((), 0.0)
    assert second.changed == (*layout, "checkpoint of step 4 converted")
    assert 60 <= second.waited <= 70
    assert (third.changed, third.waited) == ((), 0.0)
    assert read_state(json.loads(json.dumps(state.to_json()))) == state


def test_an_attempt_records_which_nodes_are_left_out() -> None:
    lost = nodes("ab")
    cluster = Faulty([DEAD, DEAD, DEAD, "ok"], [ALL, lost, ALL, lost, ALL], needs=2)
    _, state, _ = supervise(cluster, [4, 5, 6, 9], Limits(3, seconds=60.0))
    assert [one.changed for one in state.attempts] == [(), (), ("without c",), ()]


@pytest.mark.parametrize(("needs", "excluded", "used"), [(2, ["c"], ["a", "b"]), (3, [], ["a", "b", "c"])])
def test_a_node_that_was_lost_twice_is_left_out_if_the_run_has_room_without_it(
    needs: int, excluded: list[str], used: list[str]
) -> None:
    lost = nodes("ab")
    cluster = Faulty([DEAD, DEAD, "ok"], [ALL, lost, ALL, lost, ALL], needs=needs)
    _, state, _ = supervise(cluster, [4, 5, 9], Limits(3, seconds=60.0))
    assert [without for _, without in cluster.submitted] == [[], [], excluded]
    assert list(state.nodes) == used


SILENT = nodes("abd", silent="c")


def test_a_node_that_stays_silent_is_left_out_of_one_attempt_if_the_run_has_room_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every restart was given up, although the other nodes had room."""
    run_log.configure_messages()
    full = nodes("abcd")
    cluster = Faulty([DEAD, "OSError: x", "ok"], [full, *[SILENT] * 40, nodes("abCd"), full])
    _, state, _ = supervise(cluster, [4, 5, 9], Limits(3, seconds=60.0))
    assert cluster.submitted[1] == ([*WORDS, "--load"], ["c"])
    kept = next(one for one in cluster.remembered if one["job"] == "job2")
    assert (list(kept["nodes"]), kept["silent"]) == (["a", "b", "d"], ["c"]), "so that it is not lost again"
    assert [one.changed for one in state.attempts] == [(), ("without c",), ("again with c",)]
    assert [one.lost for one in state.attempts] == [("c",), (), ()]
    assert cluster.submitted[2][1] == []
    assert "nodes that do not answer are not used: c\n" in capsys.readouterr().err


def test_a_node_with_a_gpu_that_cannot_be_used_is_left_out_and_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each restart used the GPU again."""
    run_log.configure_messages()
    why = "GPU 3: GPU is lost"
    full, answering = nodes("abcd"), nodes("ab").answering
    broken = Nodes(answering, ("c", "d"), {"id c": ("c", why), "id d": ("d", "")}, (), {"c": why})
    cluster = Faulty([DEAD, "ok"], [full, broken])
    _, state, _ = supervise(cluster, [4, 9], Limits(3, min_nodes=2, seconds=60.0))
    assert cluster.submitted[1] == (["train", "--vllm.num_engines", "1", "--load"], ["c", "d"])
    assert state.attempts[0].lost == ("c", "d")
    errors = capsys.readouterr().err
    assert f"lost nodes (reason): c ({why}), d (unknown)\n" in errors
    assert "nodes that do not answer are not used: d\n" in errors
    assert f"nodes that have a GPU that cannot be used are not used: c ({why})\n" in errors


def test_a_smaller_layout_is_not_placed_on_a_node_that_stays_silent() -> None:
    cluster = Faulty([DEAD, "ok"], [nodes("abcd"), SILENT], needs=4)
    supervise(cluster, [4, 9], Limits(3, min_nodes=2, seconds=60.0))
    assert cluster.submitted[1] == (["train", "--vllm.num_engines", "1", "--load"], ["c"])


def test_a_node_that_was_lost_twice_is_used_again_instead_of_a_silent_one() -> None:
    full, lost = nodes("abcd"), nodes("acd")
    cluster = Faulty([DEAD, DEAD, "ok"], [full, lost, full, lost, SILENT])
    _, state, _ = supervise(cluster, [4, 5, 9], Limits(3, seconds=60.0))
    assert [without for _, without in cluster.submitted] == [[], [], ["c"]]
    assert list(state.nodes) == ["a", "b", "d"]


def test_a_node_that_was_restarted_twice_and_answers_again_is_left_out_too() -> None:
    """A machine that reboots in seconds answers when the attempt is cleaned up; it never counted as lost."""
    again = nodes("abC")
    cluster = Faulty([DEAD, DEAD, "ok"], [ALL, again, again, ALL], needs=2)
    _, state, _ = supervise(cluster, [4, 5, 9], Limits(3))
    assert [one.lost for one in state.attempts] == [("c",), ("c",), ()]
    assert [without for _, without in cluster.submitted] == [[], [], ["c"]]


def test_a_node_that_joined_during_the_attempt_is_lost_and_one_that_was_removed_when_idle_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an autoscaler: d joins and dies, c is removed; e was dead before, as was f, which rejoined."""
    run_log.configure_messages()
    former = {"id e": ("e", ""), "id f": ("f", "")}
    placed = Nodes({**ALL.answering, "f": "id F"}, (), former)
    answering = {"a": "id a", "b": "id b", "f": "id F"}
    ended = Nodes(answering, (), former | {"id d": ("d", "health check\nfailed")}, ("id c",))
    cluster = Faulty([DEAD, "ok"], [placed, ended])
    _, state, _ = supervise(cluster, [4, 9], Limits(3))
    assert [one.lost for one in state.attempts] == [("d",), ()]
    assert "lost nodes (reason): d (health check failed)\n" in capsys.readouterr().err
    assert read_state(cluster.remembered[-1]).gone == ["id d", "id e", "id f"]


def test_a_node_that_is_left_out_is_not_lost_again() -> None:
    """The run does not use it, so that its end is no reason to repeat an error of the program."""
    lost = nodes("ab")
    again = Nodes(lost.answering, (), {"id C": ("c", "")})
    cluster = Faulty(
        [DEAD, DEAD, "ValueError: x", "ValueError: x"], [ALL, lost, ALL, lost, ALL, again], needs=2
    )
    _, state, _ = supervise(cluster, [4, 4, 4, 4], Limits(9))
    assert [one.lost for one in state.attempts] == [("c",), ("c",), (), ()]


class Scaled(Faulty):
    """A cluster with an autoscaler: a run for which there is no room can be submitted, and asks for it."""

    def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = True) -> list[str]:
        return [] if scales else super().problems(words, excluded)


UNPLACED = "PlacementError: cannot place this run: only 2 of 3 GPUs are free"


def test_fewer_engines_are_used_when_the_autoscaler_adds_no_node() -> None:
    """The run was submitted at once whatever nodes there were, and given up after two placement timeouts."""
    cluster = Scaled([DEAD, UNPLACED, "ok"], [ALL, nodes("ab")])
    _, state, _ = supervise(cluster, [4, 4, 9], Limits(3, min_nodes=2, seconds=60.0))
    load, fewer = [*WORDS, "--load"], ["train", "--vllm.num_engines", "1", "--load"]
    assert [words for words, _ in cluster.submitted] == [WORDS, load, fewer]
    assert state.attempts[1].waited == 0, "the second attempt asks the autoscaler"
    assert 60 <= state.attempts[2].waited <= 70


def test_a_node_is_awaited_after_the_autoscaler_was_asked_in_vain() -> None:
    cluster = Scaled(
        [UNPLACED, DEAD, UNPLACED, "ok"], [nodes("ab"), *[nodes("ab")] * 3, ALL, nodes("ab"), ALL]
    )
    _, state, _ = supervise(cluster, [0, 4, 4, 9], Limits(3))
    assert [one.waited > 0 for one in state.attempts] == [False, True, False, False]


def test_a_run_that_no_autoscaler_and_no_smaller_layout_can_place_is_given_up_with_the_reason() -> None:
    cluster = Scaled([DEAD, UNPLACED], [ALL, nodes("ab")])
    with pytest.raises(GivenUpError, match=r"after 60 s on 2 nodes \(a, b\): a GPU is missing"):
        supervise(cluster, [4, 4], Limits(3, seconds=60.0))


def test_a_lost_head_is_awaited() -> None:
    cluster = Faulty(["head", "ok"], [ALL, "no Ray cluster", "no Ray cluster", ALL])
    ended, state, _ = supervise(cluster, [4, 9], Limits(3))
    assert ended.status == "SUCCEEDED"
    assert state.attempts[0].status == "HEAD LOST"


def test_a_head_that_is_lost_after_the_job_has_ended_is_awaited() -> None:
    cluster = Faulty([DEAD, "ok"], [ALL, "no Ray cluster", "no Ray cluster", ALL])
    ended, state, _ = supervise(cluster, [4, 9], Limits(3))
    assert ended.status == "SUCCEEDED"
    first = state.attempts[0]
    assert (first.status, first.code, first.error, first.lost) == ("HEAD LOST", 1, DEAD, ())
    assert cluster.submitted[1][0] == [*WORDS, "--load"]


def test_the_wait_for_a_head_that_is_lost_after_the_job_has_a_limit() -> None:
    with pytest.raises(GivenUpError, match=r"after 60 s on 0 nodes .*no Ray cluster"):
        supervise(Faulty([DEAD], [ALL, "no Ray cluster"]), [4], Limits(3, seconds=60.0))


def test_a_head_that_is_lost_after_the_last_job_is_not_awaited() -> None:
    ended, _, _ = supervise(Faulty([DEAD], [ALL, "no Ray cluster"]), [4], Limits(0))
    assert (ended.status, ended.code) == ("FAILED", 1)


def test_a_run_that_a_user_stopped_with_its_head_is_not_submitted_again() -> None:
    ended, state, _ = supervise(Faulty(["stopped"], [ALL, "no Ray cluster"]), [4], Limits(3))
    assert (ended.status, state.attempts[0].status) == ("STOPPED", "STOPPED")


def test_a_lost_head_is_the_error_when_no_restart_is_left() -> None:
    with pytest.raises(HeadLostError, match="the head was lost"):
        supervise(Faulty(["head"]), [4], Limits(0))


def test_a_job_that_may_still_run_on_a_silent_head_is_not_submitted_a_second_time() -> None:
    cluster = Faulty(["silent", "ok"])
    with pytest.raises(HeadSilentError, match=r"does not answer\. The same command follows it again"):
        supervise(cluster, [4, 9], Limits(3))
    assert len(cluster.submitted) == 1
    state = read_state(cluster.remembered[-1])
    assert (state.job, state.attempts) == ("job1", []), "the same command follows the job"


@pytest.mark.parametrize(
    ("interruption", "message"),
    [(KeyboardInterrupt, None), (HeadSilentError, r"no answer\. The same command follows it again")],
)
def test_a_job_is_known_before_it_is_submitted(
    interruption: type[BaseException], message: str | None
) -> None:
    """A signal, or a connection that broke, while the job server took the job left it to run, unknown."""

    class Interrupted(Faulty):
        def submit(self, job: str, words: Sequence[str], excluded: Sequence[str]) -> None:
            super().submit(job, words, excluded)
            raise interruption("no answer")

    cluster, state = Interrupted([]), State(list(WORDS), 1.0)
    with pytest.raises(interruption, match=message):
        supervise(cluster, [], Limits(3), state)
    assert (state.job, len(cluster.submitted)) == ("job1", 1)
    assert read_state(cluster.remembered[-1]) == state


def test_what_would_fail_again_is_not_repeated() -> None:
    cluster = Faulty(["ValueError: known cause"])
    ended, state, _ = supervise(cluster, [4], Limits(3))
    assert (ended.status, ended.code) == ("FAILED", 1)
    assert state.attempts[0].causes == ("known. remedy",)


def test_a_supervisor_that_is_started_again_follows_the_job_of_the_first() -> None:
    first = Faulty([DEAD, "ok"])
    supervise(first, [4, 9], Limits(3))
    again = Faulty(["ok"])
    _, state, _ = supervise(again, [9], Limits(3), read_state(first.remembered[-1]))
    assert again.submitted == []
    assert [one.job for one in state.attempts] == ["job1", "job2"]


def owned(owner: str, values: dict[str, Any] | None = None) -> State:
    return read_state((values or State(list(WORDS), 1.0).to_json()) | {"owner": owner})


@pytest.mark.parametrize("end", [DEAD, "head"])
def test_a_run_is_left_to_the_supervisor_that_began_last(end: str) -> None:
    """The same command while the first one was alive: both submitted the run after the next fault."""

    class Shared(Faulty):
        def follow(self, job: str, write: Callable[[str], None]) -> Ended:
            if len(self.remembered) == 2:
                supervise(self, [4, 9], Limits(3), owned("second", self.recall()))
            return super().follow(job, write)

    cluster, selected = Shared([end, "ok", end]), list[int]()
    with pytest.raises(TakenOverError, match="another `submit` supervises this run now"):
        supervise(cluster, [4], Limits(3), owned("first"), selected=selected)
    assert [words for words, _ in cluster.submitted] == [WORDS, [*WORDS, "--load"]]
    assert selected == []
    assert [state["owner"] for state in cluster.remembered] == [*["first"] * 2, *["second"] * 2]


@pytest.mark.parametrize(("end", "times"), [(DEAD, 1), ("head", 2)])  # a lost head's ranks may have written
def test_a_run_that_is_taken_over_while_it_waits_for_nodes_is_not_submitted(end: str, times: int) -> None:
    class Taken(Faulty):
        def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
            self.remember(self.remembered[-1] | {"owner": "second"})
            return super().problems(words, excluded, scales)

    cluster, selected = Taken([end]), list[int]()
    with pytest.raises(TakenOverError):
        supervise(cluster, [4], Limits(3), owned("first"), selected=selected)
    assert (len(cluster.submitted), selected) == (1, [4] * times), "before it was taken over"


def test_a_run_that_is_taken_over_while_its_head_starts_again_is_left_at_once() -> None:
    class Taken(Faulty):
        def clean(self) -> Nodes:
            if self.submitted:
                self.remember(self.remembered[-1] | {"owner": "second"})
            return super().clean()

    cluster, selected = Taken(["head"]), list[int]()
    with pytest.raises(TakenOverError):
        supervise(cluster, [4], Limits(3), owned("first"), selected=selected)
    assert (len(cluster.submitted), selected) == (1, [4]), "before the second selection"


def test_a_run_that_another_supervisor_has_ended_is_not_submitted() -> None:
    """The first one waited for nodes meanwhile; the state was deleted, and the run submitted again."""

    class Ended(Faulty):
        def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
            self.remember({"owner": "second"})
            return super().problems(words, excluded, scales)

    cluster = Ended([DEAD])
    with pytest.raises(TakenOverError):
        supervise(cluster, [4], Limits(3), owned("first"))
    assert len(cluster.submitted) == 1


def test_a_second_command_takes_over_before_the_first_has_submitted_its_job() -> None:
    class Cleaning(Faulty):
        def clean(self) -> Nodes:
            self.remember(self.remembered[-1] | {"owner": "second"})
            return super().clean()

    cluster = Cleaning(["ok"])
    with pytest.raises(TakenOverError):
        supervise(cluster, [4], Limits(3), owned("first"))
    assert cluster.submitted == []


def test_a_job_that_another_command_has_submitted_while_this_one_planned_is_followed() -> None:
    """It would run twice: both commands found no run when they started."""
    first, second = Faulty(["silent"]), Faulty(["ok"])
    with pytest.raises(HeadSilentError):
        supervise(first, [4], Limits(3), owned("first"))
    second.remembered = first.remembered[-1:]
    ended, state, _ = supervise(second, [9], Limits(3), owned("second"))
    assert (ended.job, second.submitted, state.owner) == ("job1", [], "second")


def test_an_error_of_the_file_system_with_the_checkpoints_names_it() -> None:
    class Gone(Saved):
        def complete_steps(self, since: float, loaded: int) -> set[int]:
            raise OSError(errno.ESTALE, "Stale file handle", "/ckpt/_actor")

    state = State(list(WORDS), 0.0)
    with pytest.raises(GivenUpError, match="continue from: /ckpt/_actor: Stale file handle"):
        supervisor.last_saved(cast("Checkpoints", Gone([])), state)


def test_a_head_that_does_not_answer_takes_no_run_over() -> None:
    class Silent(Faulty):
        def recall(self) -> dict[str, Any] | None:
            raise UserError("no Ray cluster")

    ended, _, _ = supervise(Silent([DEAD, "ok"]), [4, 9], Limits(3), owned("first"))
    assert ended.status == "SUCCEEDED"
