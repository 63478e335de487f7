"""A reward from a server: pictures go as PNG in JSON, numbers come back. Nothing is ever unpickled.

    POST url   {"samples": [{"png": base64, "task": {…}}, …]}
    200        {"scores": [0.7, {"score": 0.3, "aesthetic": 5.1}, {"error": "no face found"}, …]}

`scores` has one entry for each sample, in order: a number, an object with `score` and more, or an object with `error`,
which leaves that sample alone without a score. Samples that wait while all connections are busy go together, at most
`batch` in a request, so that a server with a GPU gets batches exactly when it is busy.
"""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import ConfigError, RewardError
from headway.rewards.images.image_reward import get_episode_image, image_to_png_base64
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.server_requests import normalise_url, post_json, read_api_key, retry_with_backoff
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Image

PendingSample = tuple[Image, Mapping[str, Any], asyncio.Future[Any]]


def make_image_server_reward(
    *,
    url: str,
    api_key_env: str | None = None,
    batch: int = 8,
    timeout_s: float = 60.0,
    retries: int = 3,
    pause_s: float = 1.0,
    concurrency: int = 4,
    proxy: str | None = None,
) -> BuiltInReward:
    """Give the score of the server at `url`. `concurrency`: requests at a time; `batch`: most samples in a request."""
    if batch < 1:
        raise ConfigError("must be at least 1", key="batch", value=batch)
    address, key = normalise_url(url, "url"), read_api_key(api_key_env)
    threads = ThreadLimiter(concurrency, "reward image server")
    waiting: deque[PendingSample] = deque()
    senders: set[asyncio.Task[None]] = set()

    def request(samples: Sequence[PendingSample]) -> list[Any]:
        body = {"samples": [{"png": image_to_png_base64(image), "task": dict(data)} for image, data, _ in samples]}
        return _parse_scores(post_json(address, body, key=key, timeout_s=timeout_s, proxy=proxy), len(samples), address)

    async def send() -> None:
        while waiting:
            batch_samples = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            samples = [sample for sample in batch_samples if not sample[2].done()]
            if samples:
                await _settle(samples, threads, request, retries=retries, pause_s=pause_s)

    async def score(image: Image, data: Mapping[str, Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((image, data, future))
        if len(senders) < concurrency:
            sender = asyncio.create_task(send(), name="reward image server")
            senders.add(sender)
            sender.add_done_callback(senders.discard)
        return await future

    return BuiltInReward("image_server", score, view=get_episode_image)


async def _settle(
    samples: list[PendingSample], threads: ThreadLimiter, request: Any, *, retries: int, pause_s: float
) -> None:
    """Give every sample its score, or the reason why there is none."""
    try:
        scores = await retry_with_backoff(
            lambda: threads.run(request, samples), "image server", retries=retries, pause_s=pause_s
        )
    except Exception as error:
        failed = error if isinstance(error, RewardError) else RewardError(f"image server: {error}")
        for *_, future in samples:
            if not future.done():
                future.set_exception(failed)
        return
    for (*_, future), score in zip(samples, scores, strict=True):
        if future.done():
            continue  # its caller was cancelled
        if isinstance(score, Mapping) and "error" in score:
            future.set_exception(RewardError(f"image server: {score['error']}"))
        else:
            future.set_result(score)


def _parse_scores(payload: bytes, count: int, url: str) -> list[Any]:
    """Return the entries of a reply. Raises `ValueError`."""
    try:
        scores = json.loads(payload)["scores"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{url} answered something else than scores: {payload[:200]!r}") from None
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"{url} was asked about {count} samples and answered {str(scores)[:200]}")
    return scores
