"""A request to paste."""

import json
from pathlib import Path

from qserve.serve.server import Server


def curl_line(server: Server, folder: Path) -> str:
    """A request to paste: a chat where the checkpoint has a chat template, else a completion."""
    template = (folder / "chat_template.jinja").exists()
    tokenizer = folder / "tokenizer_config.json"
    ask: dict[str, object]
    if template or (tokenizer.exists() and "chat_template" in tokenizer.read_text(encoding="utf-8")):
        route, ask = "chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    else:
        route, ask = "completions", {"prompt": "The capital of France is"}
    body = json.dumps({"model": server.model, **ask, "max_tokens": 64, "temperature": 0})
    return f"curl {server.url}/v1/{route} -H 'Content-Type: application/json' -d '{body}'"
