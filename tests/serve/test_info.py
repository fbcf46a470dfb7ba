"""`qserve info` against servers that answer as each engine does: bodies as their sources and documents show them."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from qserve.errors import ServerError, UsageError
from qserve.serve.info import Info, info_text, probe

Routes = Mapping[str, object]  # path -> JSON value, text, or a status


@contextmanager
def answering(routes: Routes, key: str | None = None) -> Iterator[str]:
    """A server with these routes on loopback; with a key, it wants it everywhere."""

    class Api(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = routes.get(self.path, 404)
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                value = 401
            status, body = (value, "") if isinstance(value, int) else (200, value)
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def vllm_routes(root: str, labels: str) -> Routes:
    metrics = (
        f"vllm:cache_config_info{{{labels}}} 1.0\n"
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    )
    card = {"id": "int8", "owned_by": "vllm", "root": root, "max_model_len": 2048}
    return {"/v1/models": {"data": [card]}, "/health": "", "/version": {"version": "0.32.0"}, "/metrics": metrics}


def test_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    with answering(vllm_routes(str(tmp_path), 'block_size="16",kv_cache_size_tokens="93184"')) as url:
        found = probe(url + "/v1/")
    assert found == Info(
        url=url, healthy=True, engine="vllm", version="0.32.0", model="int8", models=("int8",), context_tokens=2048,
        quantization="compressed-tensors", dtype=None, kv_capacity_tokens=93184, kv_used=0.25, running=3, waiting=2,
    )  # fmt: skip
    text = info_text(found)
    assert "3 running, 2 waiting" in text and "93,184 tokens, 25% used" in text and "dtype         unknown" in text
    with answering(vllm_routes("org/elsewhere", 'block_size="16",num_gpu_blocks="100"')) as url:
        older = probe(url)
    assert (older.kv_capacity_tokens, older.quantization) == (1600, None)  # the checkpoint is not on this machine
    (tmp_path / "config.json").write_text("{}")
    with answering(vllm_routes(str(tmp_path), 'block_size="16"')) as url:
        assert probe(url).quantization == "none in the checkpoint"  # it may be quantized as it starts


def test_llama_server() -> None:
    meta = {"n_ctx_train": 8192, "n_params": 134515008}
    props = {
        "default_generation_settings": {"n_ctx": 2304}, "total_slots": 8, "build_info": "b11434-abc",
        "model_ftype": "Q4_K - Medium",
    }  # fmt: skip
    routes = {
        "/v1/models": {"data": [{"id": "q4", "owned_by": "llamacpp", "meta": meta}]}, "/props": props,
        "/health": {"status": "ok"}, "/metrics": "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n",
    }  # fmt: skip
    with answering(routes) as url:
        found = probe(url)
    assert (found.engine, found.version, found.quantization) == ("llama-server", "b11434-abc", "Q4_K - Medium")
    assert (found.context_tokens, found.running, found.waiting) == (2304, 1, 0)
    assert found.kv_capacity_tokens is None


def test_tgi() -> None:
    info = {
        "model_id": "/bf16", "model_dtype": "bfloat16", "max_total_tokens": 2048, "max_batch_total_tokens": 65536,
        "version": "3.3.4", "docker_label": "sha-1",
    }  # fmt: skip
    routes = {"/info": info, "/health": "", "/metrics": "tgi_batch_current_size 4\ntgi_queue_size 1\n"}
    with answering(routes) as url:
        found = probe(url)
    assert (found.engine, found.version, found.model, found.dtype) == ("tgi", "3.3.4", "/bf16", "bfloat16")
    assert (found.context_tokens, found.kv_capacity_tokens, found.running, found.waiting) == (2048, 65536, 4, 1)


def test_sglang() -> None:
    server = {"version": "0.5.23", "quantization": "fp8", "dtype": "bfloat16", "max_total_num_tokens": 40000}
    routes = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 4096}]}, "/get_server_info": server,
        "/health": 503, "/metrics": 'sglang:num_running_reqs{model_name="m"} 2\nsglang:token_usage 0.5\n',
    }  # fmt: skip
    with answering(routes) as url:
        found = probe(url)
    assert (found.engine, found.version, found.quantization, found.dtype) == ("sglang", "0.5.23", "fp8", "bfloat16")
    assert (found.kv_capacity_tokens, found.kv_used, found.running, found.waiting) == (40000, 0.5, 2, None)
    assert found.healthy is False


def test_a_server_that_says_little() -> None:
    with answering({"/v1/models": {"data": [{"id": "a", "owned_by": "me"}, {"id": "b"}]}}) as url:
        found = probe(url)
    assert (found.engine, found.healthy, found.version, found.running) == (None, None, None, None)
    assert found.models == ("a", "b")
    assert "a (also b)" in info_text(found)


def test_keys() -> None:
    routes = {"/v1/models": {"data": [{"id": "a"}]}}
    with answering(routes, key="right") as url:
        assert probe(url, "right").model == "a"
        with pytest.raises(ServerError, match=r"refused the API key \(HTTP 401\).*\$MY_KEY") as caught:
            probe(url, "sk-wrong", "MY_KEY")
        assert "sk-wrong" not in str(caught.value)
        with pytest.raises(ServerError, match="wants an API key"):
            probe(url)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ServerError, match=r"nobody answers .*is the server running"):
            probe(f"http://127.0.0.1:{free.getsockname()[1]}")


def test_another_protocol() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ServerError, match="speaks another protocol"):
            probe(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_http_but_no_openai_api() -> None:
    with answering({"/": "<html>"}) as url, pytest.raises(ServerError, match=r"lists no model .*HTTP 404"):
        probe(url)


def test_tls_where_there_is_none() -> None:
    with answering({}) as url, pytest.raises(ServerError, match="http instead of https"):
        probe(url.replace("http:", "https:"))


BAD_URLS = [
    "localhost:8000",
    "ftp://h",
    "",
    "http://u:pw@h",
    "http://u:pw@h:99999",
    "http://[::1",
    "http://h:99999",
    "http://a..b",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_no_url(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        probe(url)
    assert "pw" not in str(caught.value)


def test_a_key_that_no_header_can_carry_is_named_and_not_shown() -> None:
    with pytest.raises(UsageError, match=r"the API key in \$MY_KEY has characters") as caught:
        probe("http://127.0.0.1:9", "sécret", "MY_KEY")
    assert "cret" not in str(caught.value)
