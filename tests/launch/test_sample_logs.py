"""What is kept of a run to look at: answers of the same kind early and late, and the first pictures of a validation."""

from __future__ import annotations

import json
from pathlib import Path

from headway.monitor.sample_excerpts import read_answers, read_images
from headway.rewards.images.image_reward import downscale_image, png_base64_to_image
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.runs.sample_logs import SampleLog
from headway.types import (
    Batch,
    DenoisingStep,
    Episode,
    FinishReason,
    Generation,
    Image,
    Sample,
    SampleGroup,
    Score,
    Task,
    Turn,
)

RED, BLUE = b"\xff\0\0", b"\0\0\xff"


def judged(prompt: str, image: Image | None) -> EvaluatedSample:
    task = Task(position=0, data={"prompt": prompt})
    actions = (DenoisingStep(image=image),) if image else (1,)
    turn = Turn(observation=(), generation=Generation(actions=actions, logps=(0.0,), runs=(), finish=FinishReason.STOP))
    answers = ((Episode(sample_id="v0.0", task=task, turns=(turn,)), Score(value=0.5)),)
    return EvaluatedSample(task=task, answers=answers)


def test_the_first_pictures_of_a_validation_are_kept(tmp_path: Path) -> None:
    image = Image(height=1, width=2, pixels=RED + BLUE)
    log = SampleLog(tmp_path)
    for trained in (0, 4):
        log.write_validation(
            trained, [judged("a", image), judged("b", None), EvaluatedSample(task=Task(position=1), answers=())]
        )
    ((first, last),) = read_images(tmp_path / "images.jsonl")
    assert (first.prompt, first.step, last.step, first.reward) == ("a", 0, 4, 0.5)
    assert png_base64_to_image(first.png) == image


def test_a_run_without_pictures_has_no_file_of_them(tmp_path: Path) -> None:
    SampleLog(tmp_path).write_validation(0, [judged("b", None)])
    assert not (tmp_path / "images.jsonl").exists()


def test_what_was_drawn_is_no_answer_to_read(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    for image in (None, Image(height=1, width=1, pixels=RED)):
        ((episode, score),) = judged("a", image).answers
        sample = Sample(sample_id="0.0", episode=episode, oldest=0, newest=0, actions=1, score=score)
        log.write_batch(Batch(trained=0, groups=(SampleGroup(group_id=0, task=episode.task, samples=(sample,)),)), 1)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def answered(sample_id: str, text: str) -> Episode:
    generation = Generation(actions=(1,), logps=(0.0,), runs=(), finish=FinishReason.STOP, text=text)
    task = Task(position=0, data={"prompt": "2+2="})
    return Episode(sample_id=sample_id, task=task, turns=(Turn(observation=(), generation=generation),))


def trained_group(*rewards: float) -> Batch:
    """Members with these rewards, which finished in the opposite order."""
    episodes = [answered(f"7.{number}", f"{reward:g}") for number, reward in enumerate(rewards)]
    samples = [
        Sample(sample_id=e.sample_id, episode=e, oldest=0, newest=0, actions=1, score=Score(value=reward))
        for e, reward in zip(episodes, rewards, strict=True)
    ]
    group = SampleGroup(group_id=7, task=episodes[0].task, samples=tuple(reversed(samples)))
    return Batch(trained=0, groups=(group,))


def test_the_report_compares_the_first_member_early_and_late_never_a_best_with_a_worst(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    log.write_batch(trained_group(0.2, 0.9, 0.0), 1)
    log.write_batch(trained_group(0.8, 0.1, 1.0), 9)
    found = read_answers(tmp_path / "samples.jsonl")
    ((early, late),) = found.pairs
    assert (early.step, early.reward, late.step, late.reward, found.kind) == (1, 0.2, 9, 0.8, "first")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert kinds == ["first", "best", "worst"] * 2


def test_answers_to_held_out_tasks_are_shown_where_there_are_any(tmp_path: Path) -> None:
    log = SampleLog(tmp_path)
    for step, reward in ((0, 0.3), (8, 0.7)):
        pairs = [(answered(f"v0.{number}", str(number)), Score(value=reward + number)) for number in (1, 0)]
        log.write_validation(step, [EvaluatedSample(task=pairs[0][0].task, answers=tuple(pairs))])
        log.write_batch(trained_group(1.0, 0.0), step + 1)
    found = read_answers(tmp_path / "samples.jsonl")
    ((early, late),) = found.pairs
    assert (early.step, early.reward, late.step, late.reward, found.kind) == (0, 0.3, 8, 0.7, "held_out")


def test_a_conversation_can_be_read_turn_by_turn(tmp_path: Path) -> None:
    said = [Generation(actions=(1,), logps=(0.0,), runs=(), finish=FinishReason.STOP, text=text) for text in "ab"]
    turns = tuple(Turn(observation=(n, n), generation=one, reward=n / 2) for n, one in enumerate(said))
    episode = Episode(sample_id="v0.0", task=Task(position=0, data={"prompt": "go"}), turns=turns, info={"turns": 2})
    log = SampleLog(tmp_path, decode=lambda tokens: f"saw {list(tokens)}")
    log.write_validation(3, [EvaluatedSample(task=episode.task, answers=((episode, Score(value=0.5)),))])
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert row["turns"][1] == {"observation": "saw [1, 1]", "answer": "b", "reward": 0.5} and row["info"] == {
        "turns": 2
    }
    (shown,) = read_answers(tmp_path / "samples.jsonl").early
    assert shown.answer == "◂ saw [0, 0]\n▸ a\n[reward 0]\n◂ saw [1, 1]\n▸ b\n[reward 0.5]"


def test_large_pictures_are_thinned_out() -> None:
    image = Image(height=2, width=4, pixels=(RED + BLUE) * 2 + (BLUE + RED) * 2)
    assert downscale_image(image, 4) is image
    assert downscale_image(image, 2) == Image(height=1, width=2, pixels=RED + RED)
