"""A scorer of pictures behind HTTP, in one file: put your own model into `score_picture`.

    python examples/image_scorer.py --port 8123
    headway train examples/images.yaml rewards.strings.reward_fn=image_server \\
        'rewards.strings.reward_args={url: "http://127.0.0.1:8123"}'

Pictures come as PNG in JSON and numbers go back; nothing is unpickled, so that neither side has to trust the other.
This one says how clear a picture is: the share of its pixels that are nearly black or nearly white.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from headway.rewards.images.image_reward import image_to_array, png_base64_to_image


def score_picture(pixels: np.ndarray[Any, np.dtype[np.uint8]], task: Mapping[str, Any]) -> dict[str, float]:
    """Return `score`, and any other numbers for the curves."""
    grey = pixels.mean(axis=2)
    return {"score": float(((grey < 64) | (grey > 192)).mean()), "ink": float((grey < 128).mean())}


def score_sample(sample: Any) -> dict[str, Any]:
    """Score one sample; an error concerns this sample alone."""
    try:
        return score_picture(image_to_array(png_base64_to_image(sample["png"])), sample["task"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class Handler(BaseHTTPRequestHandler):
    """Answers `{"samples": […]}` with `{"scores": […]}`."""

    def do_POST(self) -> None:
        try:
            samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
            answer = json.dumps({"scores": [score_sample(sample) for sample in samples]}).encode()
        except (ValueError, KeyError, TypeError) as error:
            self.send_error(400, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def main() -> None:
    """Serve on the loopback until interrupted."""
    parser = argparse.ArgumentParser(description="a scorer of pictures behind HTTP")
    parser.add_argument("--port", type=int, default=8123)
    with ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
