"""A critic in a process of its own: it estimates values, and learns from the returns that the trainer has computed.

Its losses are those of a critic inside the trainer: the same values, returns, masks, mini-batches and denominators.
Its checkpoint is the file that the trainer would write, so a run may go on with the critic in either place.

Guarantees: a step is all or nothing, as in `optimizer_steps`. Values of a group are of one version.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from headway.algorithms.advantages import Advantages
from headway.errors import ScoringError, TrainerCrashed, TrainerError
from headway.trainers.checkpoint_mark import read_completion_mark, verify_checkpoint
from headway.trainers.local.local_checkpoint import CRITIC_FILE, check_tensors_match, write_tensors
from headway.trainers.local.local_learner import accumulation_dtype, score_rows, split_by_sample
from headway.trainers.local.local_optimizer import Optimizer, overwrite_tensors
from headway.trainers.local.optimizer_steps import apply_optimizer_steps, iterate_mini_batches
from headway.trainers.local.policy_model import CriticModel
from headway.trainers.local.policy_update import UpdateReport, add_critic_gradients
from headway.trainers.local.rank_group import SINGLE_RANK
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.token_batch import TokenRow, make_token_batch, make_token_rows
from headway.trainers.local.training_thread import CommitGate, JobAbandoned, TrainingThread
from headway.types import Batch, SampleGroup


class LocalCritic:
    """The critic, with a thread that does its work. `settings.critic` are the settings of its optimizer."""

    def __init__(self, model: Any, settings: LocalSettings) -> None:
        self._settings = settings
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._critic = CriticModel(model, settings)
        parameters = {f"critic.{name}": one for name, one in self._critic.named_parameters()}
        self._optimizer = Optimizer(parameters, settings.critic or OptimizerSettings())
        self._thread = TrainingThread(settings.threads, "critic", settings.device)
        self.version = 0
        """Number of training steps done, the same as the trainer's."""

    async def train(self, batch: Batch, returns: Sequence[float], mask: Sequence[bool]) -> Mapping[str, float]:
        """Learn the returns of the actions that `mask` selects, and return metrics."""
        return await self._thread.call(lambda gate: self._learn(batch, returns, mask, gate))

    async def score(self, group: SampleGroup) -> Sequence[Sequence[float]]:
        """Return the value of the state before each action. Raise `ScoringError` if that is impossible."""
        return await self._thread.call(lambda gate: self._score(group, gate))

    async def save(self, directory: Path) -> None:
        """Write the critic beside the files of the trainer, which completes the checkpoint."""

        def work(gate: CommitGate) -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                write_tensors(self._optimizer.all_tensors(), directory / CRITIC_FILE)
            except (OSError, ValueError, SafetensorError) as error:
                raise TrainerError(f"checkpoint {directory}: {error}") from error

        await self._thread.call(work)

    async def load(self, directory: Path) -> None:
        """Restore what `save`, or a trainer with a critic of its own, wrote. Raise `TrainerError` if it is damaged."""
        await self._thread.call(lambda gate: self._load(directory))

    async def close(self) -> None:
        """Release the thread. Idempotent."""
        self._thread.abandon("the critic was closed")

    def _learn(
        self, batch: Batch, returns: Sequence[float], mask: Sequence[bool], gate: CommitGate
    ) -> dict[str, float]:
        if batch.trained != self.version:
            raise TrainerError(f"a batch for version {batch.trained}, the critic is at {self.version}")
        settings, report = self._settings, UpdateReport()
        dtype, device = accumulation_dtype(settings), settings.device
        tokens = make_token_batch(
            batch.groups,
            trained=batch.trained,
            vocabulary=self._vocabulary,
            dtype=dtype,
            device=device,
            selection=settings.selection,
        )
        mask_N = torch.tensor(mask, dtype=torch.bool, device=device)
        return_N = torch.tensor(returns, dtype=dtype, device=device)
        targets = Advantages(advantage_N=torch.zeros_like(return_N), mask_N=mask_N, return_N=return_N, kl=0.0)

        def add_gradients(rows: Sequence[TokenRow]) -> None:
            report.value_loss += add_critic_gradients(self._critic, rows, tokens, targets, settings, SINGLE_RANK, gate)

        mini_batches = list(iterate_mini_batches(tokens.rows, settings))
        try:
            apply_optimizer_steps([self._optimizer], mini_batches, add_gradients, report, self.version, gate)
        except (TrainerError, JobAbandoned):
            raise
        except Exception as error:
            kind = TrainerCrashed if gate.committed else TrainerError
            raise kind(f"critic, step {batch.trained + 1}: {type(error).__name__}: {error}") from error
        self.version += 1
        steps = max(report.steps, 1)
        return {"value_loss": report.value_loss / steps, "critic_grad_norm": report.grad_norm / steps}

    def _score(self, group: SampleGroup, gate: CommitGate) -> list[list[float]]:
        try:
            rows = make_token_rows([group], self._vocabulary)
            return split_by_sample(group, iter(score_rows(self._critic.values, rows, self._settings, gate).tolist()))
        except JobAbandoned:
            raise
        except Exception as error:
            raise ScoringError(f"group {group.group_id}: {type(error).__name__}: {error}") from error

    def _load(self, directory: Path) -> None:
        live, path = self._optimizer.all_tensors(), directory / CRITIC_FILE
        mark = read_completion_mark(directory)
        verify_checkpoint(directory, [CRITIC_FILE])
        try:
            stored = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise TrainerError(f"{directory} holds no critic: {error!r}") from error
        check_tensors_match(live, stored, path)
        overwrite_tensors(live, stored)
        self.version = mark.version
