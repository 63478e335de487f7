"""Runs of a flow model: killed and resumed, by every strategy, judged, and refused where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.ledger.ledger_records import decode_episode
from tests.runs.factory import Run, Runs, audit, count, events, gone, hold_after, parts, rows

pytest.importorskip("numpy")

PICTURES: dict[str, Any] = {
    "denoising.window_size": 2,
    "actor_infer.generating_args.num_inference_steps": 5,
    "actor_train.data_args.file_name": "strings",
    "prompt_length": None,
    "response_length": None,
    "rewards.arithmetic.reward_fn": None,
    "rewards.arithmetic.tag_included": None,
    "rewards.bright.reward_fn": f"{Path(__file__)}:bright",
}


def bright(image: Any, data: dict[str, Any]) -> float:
    """The brighter the better."""
    return float(image.mean()) / 255


def make_pictures(directory: str) -> None:
    """A flow model with random weights."""
    from headway.denoising.models.denoiser_storage import save_small_mmdit
    from headway.denoising.models.mmdit import MmditConfig
    from tests.denoising.factory import make_model

    shape = MmditConfig(height=8, width=8, characters=4, dim=16, depth=1, heads=2, alphabet="0123456789")
    save_small_mmdit(make_model(config=shape), Path(directory))


@pytest.fixture(scope="module")
def model(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("pictures") / "model"
    assert runs.template.call("tests.runs.test_images:make_pictures", str(directory)) == 0
    return directory


def begin(runs: Runs, directory: Path, model: Path, **changed: Any) -> Run:
    return runs.train(directory, **{**PICTURES, "pretrain": model, **changed})


def test_a_killed_run_goes_on_and_trains_everything_once(runs: Runs, model: Path, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_steps": 2, "save_total_limit": 1}
    held, opened = hold_after(2, tmp_path)
    options |= {"async_generation_ratio": 1, "processes": True, **held}
    run = begin(runs, tmp_path / "run", model, **options)
    assert run.until(lambda: count(run.directory, "step.end") >= 2), run.text
    children = list(parts(run).values())
    assert len(children) == 2
    run.kill()
    run.end()
    assert gone(children)
    opened.touch()
    kept = [decode_episode(blob) for (blob,) in rows(run.directory, "SELECT episode FROM payloads")]
    again = begin(runs, run.directory, model, **options)
    assert again.end() == 0, again.text
    trained = rows(run.directory, "SELECT trained_at, count(*) FROM samples WHERE end = 'trained' GROUP BY 1")
    assert trained == [(step, 4) for step in range(1, 5)]
    audit(run.directory)
    for episode in kept:
        actions = episode.turns[0].generation.actions
        assert sum(step.trained for step in actions) == 2 and actions[-1].image is not None
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == ["step-00000004"]
    lags = [event.data["train/lag_max"] for event in events(run.directory, "step.end")]
    assert max(lags) == 1.0

    judged = runs.start(tmp_path / "eval", "eval", str(run.directory), "--limit", "3", "--json")
    assert judged.end() == 0, judged.text
    result = json.loads(judged.text[judged.text.index("{") :])
    assert result["policy"].endswith("step-00000004")
    (judged_by,) = result["domains"].values()
    assert judged_by["tasks"] == 3 and 0 < judged_by["reward"] < 1


@pytest.mark.parametrize(
    "keys",
    [
        {
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.mode": "async",
            "actor_rollout_ref.rollout.with_reward": False,
            "num_gpus_per_node": 2,
            "denoising.window": "sliding",
            "use_kl_loss": True,
        },
        {"async_generation_ratio": 2, "denoising.algorithm": "diffusion_nft"},
    ],
    ids=["one step off", "nft"],
)
def test_every_strategy_runs(runs: Runs, model: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    alpha = {"async_generation_ratio": None} | keys
    run = begin(runs, tmp_path / "run", model, max_steps=3, save_steps=0, **alpha)
    assert run.end() == 0, run.text
    assert [event.data["trained"] for event in events(run.directory, "step.end")] == [1, 2, 3]
    audit(run.directory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"denoising.window_size": 9}, "denoising.window_size = 9: > 5 denoising steps − 1"),
        ({"actor_train.data_args.options.longest": 9}, "is longer than the 4 characters of the model"),
        ({"pretrain": "text-imges"}, "pretrain = 'text-imges': there is no such directory"),
        ({"actor_train.data_args.system": "draw"}, "a prompt, not a conversation"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(
    runs: Runs, model: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    run = begin(runs, tmp_path / "run", model, **changed)
    assert run.end() == 2, run.text
    assert message in run.text and "Traceback" not in run.text
    assert not (tmp_path / "run").exists()


def test_two_ranks_train_what_two_engines_draw(runs: Runs, model: Path, tmp_path: Path) -> None:
    options = {"processes": True, "max_steps": 4, "save_steps": 4, "async_generation_ratio": 1}
    options |= {"actor_train.device_mapping": "[0, 1]", "actor_infer.device_mapping": "[2, 3]"}
    options |= {"actor_train.training_args.per_device_train_batch_size": 2}
    run = begin(runs, tmp_path / "run", model, **options)
    assert run.until(lambda: count(run.directory, "step.end") >= 1), run.text
    assert {"trainer-0", "trainer-1", "engine-0", "engine-1"} <= parts(run).keys()
    assert run.end() == 0, run.text
    audit(run.directory)
    drawing = {event.who for event in events(run.directory, "request.end") if event.data["actions"]}
    assert drawing == {"engine/0", "engine/1"}
    (newest,) = (run.directory / "checkpoints").iterdir()
    assert json.loads((newest / "trainer.json").read_text())["version"] == 4
