"""What is kept of pictures: the first of a validation, small enough to look at."""

from __future__ import annotations

from pathlib import Path

from headway.launch.training_session import ImageSampleLog, SampleLog
from headway.monitor.sample_excerpts import read_images
from headway.rewards.images.image_reward import downscale_image, png_base64_to_image
from headway.rollout.sample_evaluation import EvaluatedSample
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
    log = ImageSampleLog(tmp_path / "images.jsonl")
    for trained in (0, 4):
        log(trained, [judged("a", image), judged("b", None), EvaluatedSample(task=Task(position=1), answers=())])
    ((first, last),) = read_images(tmp_path / "images.jsonl").pairs
    assert (first.prompt, first.step, last.step, first.reward) == ("a", 0, 4, 0.5)
    assert png_base64_to_image(first.png) == image


def test_a_run_without_pictures_has_no_file_of_them(tmp_path: Path) -> None:
    ImageSampleLog(tmp_path / "images.jsonl")(0, [judged("b", None)])
    assert not (tmp_path / "images.jsonl").exists()


def test_what_was_drawn_is_no_answer_to_read(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl")
    for image in (None, Image(height=1, width=1, pixels=RED)):
        ((episode, score),) = judged("a", image).answers
        sample = Sample(sample_id="0.0", episode=episode, oldest=0, newest=0, actions=1, score=score)
        log(Batch(trained=0, groups=(SampleGroup(group_id=0, task=episode.task, samples=(sample,)),)), 1)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def test_large_pictures_are_thinned_out() -> None:
    image = Image(height=2, width=4, pixels=(RED + BLUE) * 2 + (BLUE + RED) * 2)
    assert downscale_image(image, 4) is image
    assert downscale_image(image, 2) == Image(height=1, width=2, pixels=RED + RED)
