"""The penalty of DAPO for answers that come near the longest length."""

from headway.errors import ConfigError
from headway.types import Episode, Score


class OverlongPenalty:
    """Scores 0 up to `longest − buffer` tokens, then falls evenly to −`penalty` at `longest` and goes on below."""

    def __init__(self, *, longest: int, buffer: int, penalty: float = 1.0) -> None:
        if buffer < 1 or longest < buffer:
            raise ConfigError("must be at least 1 and at most `longest`", key="buffer", value=buffer)
        self._longest, self._buffer, self._penalty = longest, buffer, penalty

    async def score(self, episode: Episode) -> Score:
        length = sum(len(turn.generation.actions) for turn in episode.turns)
        beyond = max(0, length - (self._longest - self._buffer))
        return Score(value=-beyond / self._buffer * self._penalty)
