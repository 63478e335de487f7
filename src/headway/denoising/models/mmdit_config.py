"""The shape of the small multimodal transformer, the alphabet of its prompts, and its `config.json`."""

from __future__ import annotations

import json
import string
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.denoising.models.denoiser import CONFIG_FILE, read_checkpoint_config
from headway.errors import ConfigError

DEFAULT_ALPHABET = string.digits + string.ascii_letters + string.punctuation + " "
"""Characters of prompts, unless a model has an alphabet of its own."""
NOISE_LEVEL_FREQUENCIES = 64
"""Number of sines and of cosines that encode a noise level."""
SMALL_MMDIT_TYPE = "headway-small-mmdit"
"""`model_type` in `config.json`; it tells such a directory from a language model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MmditConfig:
    """The defaults have about one million parameters. Raises `ConfigError` if the numbers do not fit together."""

    height: int = 16
    width: int = 32
    channels: int = 1
    patch: int = 4
    """Side of the square of pixels that is one token. Half of it costs four times the tokens."""
    characters: int = 8
    """Length of the longest prompt."""
    alphabet: str = DEFAULT_ALPHABET
    dim: int = 96
    depth: int = 4
    heads: int = 4
    mlp_ratio: float = 3.0

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels", "patch", "characters", "dim", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", key=name, value=getattr(self, name))
        for name in ("height", "width"):
            if getattr(self, name) % self.patch:
                raise ConfigError(f"is no multiple of patch = {self.patch}", key=name, value=getattr(self, name))
        if self.channels not in (1, 3):
            raise ConfigError("must be 1 (grey) or 3 (red, green, blue)", key="channels", value=self.channels)
        if self.dim % self.heads:
            raise ConfigError(f"is no multiple of heads = {self.heads}", key="dim", value=self.dim)
        if len(set(self.alphabet)) != len(self.alphabet) or not self.alphabet:
            raise ConfigError("names a character twice or none at all", key="alphabet", value=self.alphabet)

    @property
    def patches(self) -> int:
        """Tokens of a picture."""
        return self.height // self.patch * (self.width // self.patch)

    def tokenize(self, prompt: str) -> list[int]:
        """Return one token per character, padded with 0 to `characters`; 1 stands for an unknown character."""
        if len(prompt) > self.characters:
            raise ConfigError(
                f"is longer than the {self.characters} characters of the model",
                key="prompt",
                value=prompt,
                hint="shorten it, or make a model with more `characters`",
            )
        known = [self.alphabet.find(letter) + 2 if letter in self.alphabet else 1 for letter in prompt]
        return known + [0] * (self.characters - len(known))

    def save(self, directory: Path) -> None:
        """Write `config.json`."""
        content = json.dumps({"model_type": SMALL_MMDIT_TYPE, **asdict(self)}, indent=2, ensure_ascii=False)
        (directory / CONFIG_FILE).write_text(content + "\n", encoding="utf-8")


def is_small_mmdit(directory: Path) -> bool:
    """Return whether the directory holds a `SmallMmdit`."""
    return read_checkpoint_config(directory).get("model_type") == SMALL_MMDIT_TYPE


def read_mmdit_config(directory: Path) -> MmditConfig:
    """Read the shape of a saved model. Raises `ConfigError`."""
    if not is_small_mmdit(directory):
        raise ConfigError(
            f"is no directory of a small MMDiT ({CONFIG_FILE} with model_type {SMALL_MMDIT_TYPE})",
            key="pretrain",
            value=str(directory),
        )
    content = read_checkpoint_config(directory)
    try:
        return MmditConfig(**{name: value for name, value in content.items() if name != "model_type"})
    except TypeError as error:
        problem = f"{CONFIG_FILE} was written for another version: {error}"
        raise ConfigError(problem, key="pretrain", value=str(directory)) from error
