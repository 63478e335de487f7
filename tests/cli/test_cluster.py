"""`headway cluster check` and `headway train … --dry-run`: what is there, what would go where. Nothing is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.cli import cluster_command, main
from headway.cli.cluster_command import format_size
from headway.config import load_config
from headway.monitor import resource_usage
from headway.placement.memory_needs import estimate_component_needs, sum_by_memory
from headway.placement.placement import Placement
from tests.cli.factory import EXAMPLES

ARITHMETIC = str(EXAMPLES / "arithmetic.yaml")
LAYERS, HEADS, HEAD_SIZE = 2, 2, 8


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["cluster", "check", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a size that takes no time."""
    monkeypatch.setattr(cluster_command, "_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(cluster_command, "_DISK_BYTES", 1 << 20)
    monkeypatch.setattr(cluster_command, "_CHUNK", 1 << 18)


@pytest.mark.usefixtures("quick")
def test_what_is_here_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import torch

    found = facts(capsys)
    assert found["cores"] >= 1 and found["memory"]["total"] > found["memory"]["free"] > 0
    assert found["packages"].keys() == {"torch", "transformers", "ray", "vllm", "sglang"}
    assert found["packages"]["torch"] == torch.__version__
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found["room"]["disk"] > 0
    assert found["bytes_per_s"].keys() == {"memory copy", "disk write", "disk read"}
    assert all(speed > 1e6 for speed in found["bytes_per_s"].values())
    assert main(["cluster", "check"]) == 0
    shown = capsys.readouterr().out
    assert "CPU cores" in shown and "GB/s" in shown


@pytest.mark.usefixtures("quick")
def test_a_configuration_is_placed_without_reading_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("pretrain=/no/such/model", "device=cpu", f"output_dir={tmp_path / 'run'}")
    found = facts(capsys, ARITHMETIC, *options, "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1,2]")
    assert [(part["name"], part["lives"], part["memory"]) for part in found["parts"]] == [
        ("trainer", "process", "host"),
        ("engine/0", "process", "host"),
        ("engine/1", "process", "host"),
    ]
    assert "3 devices" in found["notes"][0]
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".headway*")), "nothing is left behind"


@pytest.mark.usefixtures("quick")
def test_ranks_are_shown_with_their_devices_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    mapped = ("device=cpu", "actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2]")
    found = facts(capsys, ARITHMETIC, *mapped)
    assert found["layout"] == {"ranks": 2, "data": 2, "context": 1, "tensor": 1, "shards": 2}
    assert found["parts"][1]["rank"] == {"devices": [1], "data": 1, "context": 0, "tensor": 0}
    assert "rank" not in found["parts"][2]
    assert main(["cluster", "check", ARITHMETIC, *mapped]) == 0
    assert "device 1: data 1, context 0, tensor 0" in capsys.readouterr().out


def test_what_cannot_be_placed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "check", ARITHMETIC, "async_generation_ratoi=2"]) == 2
    assert "async_generation_ratoi" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["cluster"])


def tiny(directory: Path) -> Path:
    """A model directory whose shapes are known."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.models.tiny_model import make_tiny_model

    make_tiny_model(directory, steps=0)
    written = json.loads((directory / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=written["vocab_size"],
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))


def dry(model: Path, run: Path, *more: str) -> list[str]:
    lengths = ("prompt_length=64", "response_length=32", "rollout_batch_size=2", "num_return_sequences_in_group=4")
    return ["train", ARITHMETIC, f"pretrain={model}", f"output_dir={run}", "device=cpu", *lengths, *more]


def test_a_dry_run_says_who_needs_what_and_starts_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*dry(model, tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("engine/0") == 1, "where it goes is said once"
    assert "trainer" in shown and "optimizer" in shown and "KV" in shown
    assert "fits" in shown and "does not fit" not in shown
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_is_said_to(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 200 kB\nMemAvailable: 100 kB\n")
    monkeypatch.setattr(resource_usage, "_PROC", tmp_path)
    assert main([*dry(model, tmp_path / "run"), "--dry-run"]) == 0
    assert "100 KiB free: does not fit" in capsys.readouterr().out


def test_a_dry_run_refuses_what_a_run_would_refuse(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*dry(model, tmp_path, "response_length=900"), "--dry-run"]) == 2
    assert "256 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 90}},
            "sequence_length = 96: llama rotates positions by dynamic",
        ),
    ],
)
def test_a_model_that_our_engine_cannot_serve_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: dict[str, Any], problem: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    known = json.loads((copy / "config.json").read_text())
    known.pop("rope_parameters", None)
    (copy / "config.json").write_text(json.dumps({**known, **written}))
    assert main([*dry(copy, tmp_path / "run"), "--dry-run"]) == 2
    assert problem in capsys.readouterr().err


PLACE = Placement(device="cpu", processes=True, train_threads=1, infer_threads=1, replicas=2)


def needs(model: Path, **options: Any) -> dict[str, dict[str, int]]:
    from headway.launch.language_components import LanguageModelFamily

    resolved = load_config({"pretrain": str(model), "allow_uncorrected_async": True, **options})
    return {
        part.name: dict(part.needs)
        for part in estimate_component_needs(resolved, PLACE, LanguageModelFamily().find_policy(resolved))
    }


def test_needs_are_those_of_the_shapes(model: Path) -> None:
    from headway.models.model_loading import count_parameters

    count = count_parameters(model)
    found = needs(
        model,
        rollout_batch_size=2,
        num_return_sequences_in_group=4,
        prompt_length=64,
        response_length=32,
        async_generation_ratio=1,
    )
    assert found["trainer"] == {
        "weights": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count,
        "host:versions": 3 * 4 * count,
    }
    in_flight = 2 * 2 * 4  # (1 + α) · groups · members
    assert found["engine/0"] == {
        "weights": 2 * 4 * count,
        "KV": 4 * 2 * LAYERS * HEADS * HEAD_SIZE * (in_flight + in_flight // 8) * 96,  # and prompts of groups
    }
    assert found["engine/1"] == found["engine/0"]


def test_adapters_a_reference_and_a_critic_count(model: Path) -> None:
    from headway.models.model_loading import count_parameters

    count, width = count_parameters(model), HEADS * HEAD_SIZE
    attention, mlp = 4 * 2 * width, 3 * (width + 32)
    found = needs(model, **{"actor_train.model_args.lora_rank": 4})
    assert found["trainer"]["optimizer"] == 8 * 4 * LAYERS * (attention + mlp)
    found = needs(model, **{"actor_train.model_args.lora_rank": 4, "actor_train.model_args.lora_target": ["q_proj"]})
    assert found["trainer"]["optimizer"] == 8 * 4 * LAYERS * 2 * width
    assert needs(model, use_kl_loss=True)["trainer"]["reference"] == 4 * count
    assert needs(model, adv_estimator="gae")["trainer"]["critic"] == 16 * count


def test_sizes_are_summed_where_they_lie_and_can_be_read(model: Path) -> None:
    from headway.launch.language_components import LanguageModelFamily

    resolved = load_config({"pretrain": str(model)})
    parts = estimate_component_needs(resolved, PLACE, LanguageModelFamily().find_policy(resolved))
    assert sum_by_memory(parts) == {"host": sum(part.total for part in parts)}
    assert sum_by_memory(estimate_component_needs(resolved, PLACE)) == {}
    assert [format_size(size) for size in (12, 2048, 5 << 20, 3 << 29)] == ["12 B", "2 KiB", "5 MiB", "1.5 GiB"]
