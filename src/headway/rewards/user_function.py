"""Functions and classes that users judge answers with, and the reward that runs one in this process.

Most run in worker processes (`user_reward_workers`). This process runs those that no other can import: closures, and
functions of a notebook or of a script that cannot be imported without starting its work again.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headway.deadlines import pause_deadline
from headway.errors import RewardError
from headway.processes.loop_thread import LoopThread, UnusualExit
from headway.processes.stack_dumps import describe_thread
from headway.rewards.base import final_text, get_task_data
from headway.rewards.images.image_reward import get_episode_image, image_to_array
from headway.rewards.scoring_functions import adapt_foreign_function, result_to_score
from headway.rewards.thread_limiter import CallSlots, run_on_thread
from headway.types import Episode, Score
from headway.user_code import WorkingDirectory

_ANSWER_S = 2.0
"""How long an event loop that is not blocked may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTraits:
    """What can be said of a user's function or class without calling it."""

    view: Literal["text", "image", "episode"]
    """What of an episode it looks at; the whole of it for a class."""
    is_coroutine: bool

    def select_subject(self, episode: Episode) -> Any:
        """Return what it looks at. Raises `RewardError` if the episode has none."""
        if self.view == "episode":
            return episode
        return get_episode_image(episode) if self.view == "image" else final_text(episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFunction:
    """A user's function, or the method `score` of a user's class, ready to be called."""

    name: str
    traits: FunctionTraits
    function: Callable[..., Any]
    """Called with the subject, the task's data and `arguments`; the method of a class with the episode alone."""
    arguments: Mapping[str, Any]

    def call(self, subject: Any, data: Mapping[str, Any]) -> Any:
        """Call the function, and return its result or an awaitable."""
        if self.traits.view == "episode":
            return self.function(subject)
        return self.function(
            image_to_array(subject) if self.traits.view == "image" else subject, data, **self.arguments
        )

    def make_score(self, result: Any, sample_id: str) -> Score:
        """Return the score that a result means. Raises `RewardError` if it is none."""
        try:
            return result_to_score(self.name, result)
        except RewardError as error:
            raise RewardError(f"{error} ({sample_id})") from error

    def make_error(self, error: BaseException, sample_id: str) -> RewardError:
        """Return the error that says what the function raised, on which sample, and where."""
        if isinstance(error, RewardError):
            return error
        what = str(error) if isinstance(error, UnusualExit) else f"{type(error).__name__}: {error}"
        return RewardError(f"{self.name} raised {what.removesuffix(': ')}{_locate(error)} ({sample_id})")


def read_function_traits(found: Any) -> FunctionTraits:
    """Return the traits of a function, or of a class with `score`."""
    if isinstance(found, type):
        method = getattr(found, "score", None)
        return FunctionTraits(view="episode", is_coroutine=inspect.iscoroutinefunction(method))
    is_coroutine = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    return FunctionTraits(view="image" if _first_parameter(found) == "image" else "text", is_coroutine=is_coroutine)


def load_function(found: Any, name: str, arguments: Mapping[str, Any], answer: str) -> LoadedFunction:
    """Prepare a function, also one of verl or TRL, or an object of a class. `answer` names the column of the answer."""
    traits = read_function_traits(found)
    if isinstance(found, type):
        return LoadedFunction(name=name, traits=traits, function=found(**arguments).score, arguments={})
    called = adapt_foreign_function(found, answer) or found
    return LoadedFunction(name=name, traits=traits, function=called, arguments=arguments)


class FunctionReward:
    """A user's function in this process: on a thread, or on an event loop of its own if it is `async`.

    A call that takes longer than `timeout_s` fails, and its thread is left to itself.
    """

    def __init__(self, loaded: LoadedFunction, *, concurrency: int = 8, timeout_s: float = 600.0) -> None:
        self._loaded, self._timeout_s = loaded, timeout_s
        self._slots, self._loop = CallSlots(concurrency), LoopThread(f"reward {loaded.name}")
        self._directory = WorkingDirectory(loaded.name)

    async def score(self, episode: Episode) -> Score:
        with pause_deadline():
            if self._loaded.traits.is_coroutine:
                return await self._judge(episode)
            return await self._slots.run(lambda: self._judge(episode))

    async def _judge(self, episode: Episode) -> Score:
        loaded, data = self._loaded, get_task_data(episode)
        threads: list[int] = []
        try:
            subject = loaded.traits.select_subject(episode)
            async with asyncio.timeout(self._timeout_s):
                if loaded.traits.is_coroutine:
                    result = await self._loop.run(loaded.call, subject, data)
                else:
                    name = f"reward {loaded.name}"
                    result = await run_on_thread(name, lambda: loaded.call(subject, data), threads.append)
                    if inspect.isawaitable(result):
                        result = await self._loop.run(lambda: result)
        except TimeoutError:
            where = await self._find_culprit(threads)
            problem = f"{loaded.name}: no verdict after {self._timeout_s:g} s{where} ({episode.sample_id})"
            raise RewardError(problem) from None
        except Exception as error:
            raise loaded.make_error(error, episode.sample_id) from error
        finally:
            self._directory.restore()
        return loaded.make_score(result, episode.sample_id)

    async def _find_culprit(self, threads: list[int]) -> str:
        """Say where a call is that takes too long. An event loop that is blocked is given up."""
        if threads:
            return describe_thread(threads[0])
        if not await self._loop.is_blocked(_ANSWER_S):
            return ""
        where = self._loop.describe()
        self._loop.abandon(f"{self._loaded.name} blocks its event loop{where}")
        return f": it blocks its event loop{where}"


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def _locate(error: BaseException) -> str:
    """Return the file and line that raised the error: the last frame of the traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
