"""GGUF files of a few kilobytes, and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, HEADS, WIDE = 32, 4, 64


def byte_letters() -> list[str]:
    """The letters that byte-level vocabularies write bytes with."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path: Path, *, own_head: bool = False, pre: str = "smollm", padding: int | None = 2) -> Path:
    """A random Llama of one layer with a byte-level tokenizer that can merge two newlines."""
    newline = "Ċ"
    tokens = [*SPECIAL, *byte_letters(), newline * 2]
    kinds = [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{newline} {newline}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if padding is not None:
        writer.add_pad_token_id(padding)
    writer.add_chat_template(TEMPLATE)
    dice = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens), own_head).items():
        writer.add_tensor(name, dice.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary: int, own_head: bool) -> dict[str, tuple[int, ...]]:
    block = {f"attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    block |= {"ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)}
    norms = {"blk.0.attn_norm.weight": (HIDDEN,), "blk.0.ffn_norm.weight": (HIDDEN,), "output_norm.weight": (HIDDEN,)}
    head = {"output.weight": (vocabulary, HIDDEN)} if own_head else {}
    layers = {f"blk.0.{name}.weight": shape for name, shape in block.items()}
    return {"token_embd.weight": (vocabulary, HIDDEN), **layers, **norms, **head}


@contextmanager
def local_hub(models: dict[str, Path]) -> Iterator[str]:
    """A hub with these directories by name, as far as downloads need one; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(models))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _handler(models: dict[str, Path]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            asks_api = parts[:2] == ["api", "models"]
            parts = parts[2:] if asks_api else parts
            directory = models.get("/".join(parts[:2]))
            if directory is None:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
            elif asks_api and "tree" in parts:
                self._send(200, json.dumps([_entry(file) for file in _files(directory)]).encode(), {}, body)
            elif asks_api:
                siblings = [{"rfilename": file.name} for file in _files(directory)]
                about = {"id": "/".join(parts[:2]), "sha": _COMMIT, "siblings": siblings}
                self._send(200, json.dumps(about).encode(), {}, body)
            else:
                content = (directory / parts[-1]).read_bytes()
                tag = hashlib.sha1(content).hexdigest()
                self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": _COMMIT}, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    return Handler


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.is_file())


def _entry(file: Path) -> dict[str, object]:
    content = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
