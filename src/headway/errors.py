"""Every error that Headway raises on purpose.

A message says what happened, where, and the value that caused it. The type of an error says whether a retry makes
sense, so that recovery never parses text.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST_VALUE = 200
"""Characters of a value that a message shows."""


class HeadwayError(Exception):
    """Base of everything raised on purpose."""


class ConfigError(HeadwayError):
    """A configuration that cannot run. Raised before anything starts."""

    def __init__(self, problem: str, *, key: str = "", value: object = None, hint: str = "") -> None:
        self.key = key
        self.value = value
        self.hint = hint
        where = f"{key} = {_shorten(repr(value))}: " if key else ""
        tail = f" ({hint})" if hint else ""
        super().__init__(f"{where}{problem}{tail}")


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}… ({len(text):,} characters)"


class ConfigErrors(ConfigError):
    """Several problems of one configuration, reported together."""

    def __init__(self, problems: list[ConfigError]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def suggest_close_match(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the known name closest to a misspelt one, or an empty text if none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


class IllegalTransition(HeadwayError):
    """A stage tried a change of state that the state machine does not have."""


class ChannelClosed(HeadwayError):
    """The stream has ended: nothing more can be sent or received."""


class DeadlineExceeded(HeadwayError):
    """A wait ran past its deadline; the message names the owner and what it waited for."""


class LockTimeout(DeadlineExceeded):
    """A resource lock was not given back in time; the message names the holder."""


class Deadlock(HeadwayError):
    """Nothing is scheduled on the virtual clock, and the flow has not ended. Carries the wait-for graph."""


class Stalled(HeadwayError):
    """There was no progress for the configured time on the wall clock. Carries the wait-for graph."""


class InvariantBroken(HeadwayError):
    """An invariant of the system was about to be broken. This is always a bug in Headway, never in user code."""


class BackendError(HeadwayError):
    """A back end failed. `fatal` back ends must be restarted before they are used again."""

    fatal = False


class EngineError(BackendError):
    """One request failed; the engine itself still serves."""


class EngineCrashed(BackendError):
    """The engine died with everything it held."""

    fatal = True


class TrainerError(BackendError):
    """One training step failed and changed nothing; it may be tried again."""


class TrainerCrashed(BackendError):
    """The trainer died; everything since its last checkpoint is lost."""

    fatal = True


class ScoringError(BackendError):
    """Log-probabilities or values of a group could not be computed."""


class TransferError(BackendError):
    """A weight bucket was lost, late or failed its checksum."""


class EnvironmentFailed(BackendError):
    """An environment raised, hung or returned nonsense. The episode is lost, the run goes on."""


class EpisodeTooLong(EnvironmentFailed):
    """The first observation of an episode leaves no room for an answer."""


class RewardError(BackendError):
    """A reward function failed, so the sample has no reward. That is not a reward of zero."""


class PluginError(HeadwayError):
    """Code of a plugin failed; the message names it and the line. `SystemExit` of a plugin is such a failure too."""


class RunStopped(HeadwayError):
    """The run ended early and cleanly, with a checkpoint; the message says why."""


class LedgerError(HeadwayError):
    """The ledger refused an entry, such as a second end for one sample."""
