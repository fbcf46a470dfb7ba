"""Where models come from: folders, GGUF files, and a Hub that refuses in every way it can."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_stand_in import hub_stand_in
from tiny import llama_arrays, llama_config, write_llama, write_safetensors

from qserve.errors import UsageError
from qserve.prep.source import look, open_model
from qserve.recipe import Recipe
from qserve.workspace import Workspace

CALL = """
import sys
from pathlib import Path
from qserve.errors import UsageError
from qserve.prep.source import look, open_model
from qserve.recipe import Recipe
from qserve.workspace import Workspace
recipe = Recipe.model_validate({"model": "me/tiny", "revision": sys.argv[2] or None,
    "calibration": {"dataset": "a/b"}, "variants": {"fp8": {"method": "fp8"}}})
try:
    outline = look(recipe, print)
    model = open_model(recipe, outline, Workspace(Path(sys.argv[1])))
    print(outline.revision, sorted(p.name for p in model.path.iterdir()))
except UsageError as error:
    print("UsageError:", error)
"""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def recipe_of(model: Path) -> Recipe:
    variants = {"fp8": {"method": "fp8"}}
    return Recipe.model_validate({"model": str(model), "calibration": {"dataset": "a/b"}, "variants": variants})


def test_a_folder_is_read_and_never_written_to(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "with space--and dashes")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    space = Workspace(tmp_path / "ws")
    outline = look(recipe_of(folder), print)
    model = open_model(recipe_of(folder), outline, space)
    assert outline.bf16_bytes == sum(values.nbytes for _, values in llama_arrays(llama_config()).values())
    assert {p.name for p in model.carried} == {
        "LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    again = open_model(recipe_of(folder), outline, space)
    assert (again.sha256, again.identity) == (model.sha256, model.identity)


def test_the_identity_follows_weights_and_tokenizer(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    space = Workspace(tmp_path / "ws")
    first = open_model(recipe_of(folder), look(recipe_of(folder), print), space)
    (folder / "chat_template.jinja").write_text("another")
    second = open_model(recipe_of(folder), look(recipe_of(folder), print), space)
    write_safetensors(folder / "model.safetensors", llama_arrays(llama_config(), seed=9))
    third = open_model(recipe_of(folder), look(recipe_of(folder), print), space)
    assert first.sha256 == second.sha256 != third.sha256
    assert len({first.identity, second.identity, third.identity}) == 3


def test_what_is_no_model_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; give a model folder"):
        look(recipe_of(tmp_path / "nowhere"), print)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        look(recipe_of(tmp_path / "empty"), print)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no safetensors weights"):
        look(recipe_of(tmp_path / "empty"), print)
    folder = write_llama(tmp_path / "m")
    config = llama_config() | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"is already quantized \(gptq\)"):
        look(recipe_of(folder), print)


# --- a Hub on loopback ----------
@contextmanager
def hub(folder: Path, status: int = 200, code: str = "") -> Iterator[str]:
    """With one public model; `status` and `code`: how it refuses whatever is asked."""
    with hub_stand_in(token="hf_secret") as made:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        made.add("me/tiny", files, private=False, fixed_head=COMMIT)
        if status != 200:
            made.fail("", status=status, headers={"X-Error-Code": code} if code else {})
        yield made.url


def ask(tmp_path: Path, endpoint: str, revision: str = "", **env: str) -> str:
    words = [sys.executable, "-c", CALL, str(tmp_path / "ws"), revision]
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_secret"}
    done = subprocess.run(
        words, env={**os.environ, **own, **env}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hf_secret" not in done.stdout
    return done.stdout.strip()


def test_a_hub_model_is_fetched_once_and_then_needs_no_network(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    with hub(folder) as endpoint:
        first = ask(tmp_path, endpoint)
    assert first.startswith(COMMIT)
    assert "model.safetensors" in first
    assert "LICENSE" in first
    assert "pytorch_model.bin" not in first
    offline = ask(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline == first
    assert ask(tmp_path, "http://127.0.0.1:9", COMMIT, HF_HUB_OFFLINE="1") == first


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (403, "GatedRepo", "is gated: accept its terms at"),
        (401, "RepoNotFound", "check the spelling, or, if it is private"),
        (404, "RepoNotFound", "the Hub shows no me/tiny"),
        (404, "RevisionNotFound", "has no revision"),
        (403, "", "your token does not allow it"),
    ],
)
def test_each_refusal_has_its_own_sentence(tmp_path: Path, status: int, code: str, sentence: str) -> None:
    with hub(write_llama(tmp_path / "m"), status, code) as endpoint:
        answer = ask(tmp_path, endpoint, "main")
    assert answer.startswith("UsageError: ")
    assert sentence in answer


def test_offline_and_out_of_reach_are_told_apart(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE is set" in ask(tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "the Hub cannot be reached" in ask(tmp_path, "http://127.0.0.1:9")
