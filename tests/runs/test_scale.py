"""`headway scale` on a run at work, and an engine on the trainer's devices: real processes, real tokens."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.runs.factory import Runs, audit, count, events, gone, parts, segments


def test_engines_join_and_leave_a_run_at_work(runs: Runs, tmp_path: Path) -> None:
    before = segments()
    run = runs.train(tmp_path / "run", max_steps=5000, processes=True, response_length=24)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text

    def scale(engines: int) -> tuple[int, str]:
        asked = runs.start(tmp_path / f"scale-{engines}", "scale", str(run.directory), "--engines", str(engines))
        return asked.end(), asked.text

    assert scale(0)[0] == 2 and scale(1000)[0] == 2
    code, said = scale(2)
    assert code == 0 and "engine/1 joins" in said, said
    assert run.until(lambda: count(run.directory, "up") >= 1), run.text
    assert run.until(lambda: "engine-1" in parts(run))
    stays, leaver = parts(run)["engine-0"], parts(run)["engine-1"]
    now = count(run.directory, "step.end")
    assert run.until(lambda: count(run.directory, "step.end") >= now + 3), run.text
    code, said = scale(1)
    assert code == 0 and "engine/1 leaves" in said, said
    assert run.until(lambda: not Path(f"/proc/{leaver}").exists()), "its process ends while the run goes on"
    assert parts(run)["engine-0"] == stays
    now = count(run.directory, "step.end")
    assert run.until(lambda: count(run.directory, "step.end") >= now + 2), run.text
    run.kill(signal.SIGINT)
    assert run.end() == 1, run.text
    assert gone([stays]) and segments() <= before
    audit(run.directory)
    (joined,), (up,), (left,) = (events(run.directory, kind) for kind in ("join", "up", "leave"))
    assert joined.who == up.who == left.who == "engine/1"
    assert up.data["version"] >= 1, "it begins with what the trainer has by then"
    assert {e.who for e in events(run.directory, "request.start") if up.time_s < e.time_s < left.time_s} == {
        "engine/0",
        "engine/1",
    }
    assert not [e for e in events(run.directory, "request.start") if e.who == "engine/1" and e.time_s > left.time_s]
    lags = [e.data["trained"] - e.data["oldest"] for e in events(run.directory, "group.train")]
    assert max(lags) <= 1
    assert not events(run.directory, "down", "error")


def test_an_engine_on_the_trainers_devices_works_between_steps(runs: Runs, tmp_path: Path) -> None:
    run = runs.train(
        tmp_path / "run",
        max_steps=6,
        processes=True,
        lend_idle_trainer=True,
        num_gpus_per_node=2,
        actor_infer__device_mapping="[1]",
        actor_train__device_mapping="[0]",
        actor_infer__strategy_args__strategy_config__max_num_seqs=2,
        rollout_batch_size=4,
        response_length=24,
    )
    assert run.end() == 0, run.text
    audit(run.directory)
    lent = [e for e in events(run.directory, "request.end") if e.who == "engine/lent-0"]
    assert sum(e.data["actions"] for e in lent) > 0
    busy = False
    for event in events(run.directory, "step.begin", "step.end", "request.start"):
        busy = event.kind == "step.begin" or (busy and event.kind != "step.end")
        assert not (busy and event.who == "engine/lent-0"), "it is given work while its devices train"
    assert not events(run.directory, "down", "error")

    refused = runs.train(tmp_path / "other", lend_idle_trainer=True)
    assert refused.end() == 2 and "lend_idle_trainer = True" in refused.text and "nothing to lend" in refused.text
