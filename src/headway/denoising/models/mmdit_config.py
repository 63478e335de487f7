"""The shape of the small multimodal transformer, and the alphabet of its prompts."""

from __future__ import annotations

import string
from dataclasses import dataclass

from headway.errors import ConfigError

DEFAULT_ALPHABET = string.digits + string.ascii_letters + string.punctuation + " "
"""What prompts are written with unless a model says otherwise."""
NOISE_LEVEL_FREQUENCIES = 64
"""Of the sines and cosines that a noise level is written in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MmditConfig:
    """About one million parameters as it stands. Raises `ConfigError` where the numbers do not fit together."""

    height: int = 16
    width: int = 32
    channels: int = 1
    patch: int = 4
    """Side of the square of pixels that is one token. Half of it costs four times the tokens."""
    characters: int = 8
    """Longest prompt."""
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

    @property
    def parameters(self) -> int:
        """How many numbers a model of this shape learns."""
        d, pixels = self.dim, self.channels * self.patch**2
        hidden, norms = int(d * self.mlp_ratio), 2 * (d // self.heads)
        seen = _linear(d, 3 * d) + norms
        stream = seen + _linear(d, 6 * d) + _linear(d, d) + _linear(d, hidden) + _linear(hidden, d)
        last = stream + seen + _linear(d, 2 * d)
        inputs = _linear(pixels, d) + (self.patches + self.characters + len(self.alphabet) + 2) * d
        steering = _linear(2 * NOISE_LEVEL_FREQUENCIES, d) + 3 * _linear(d, d)
        outputs = _linear(d, 2 * d) + _linear(d, pixels)
        return inputs + steering + 2 * (self.depth - 1) * stream + last + outputs

    def tokens(self, prompt: str) -> list[int]:
        """Of one prompt, filled up with 0 to `characters`."""
        if len(prompt) > self.characters:
            raise ConfigError(
                f"is longer than the {self.characters} characters of the model",
                key="prompt",
                value=prompt,
                hint="shorten it, or make a model with more `characters`",
            )
        known = [self.alphabet.find(letter) + 2 if letter in self.alphabet else 1 for letter in prompt]
        return known + [0] * (self.characters - len(known))


def _linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs
