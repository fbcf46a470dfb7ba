"""Bad input to every command, through the front door: one sentence that says what to do, no traceback, no long work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_llama
from typer.testing import CliRunner

from qserve.cli import app

LONG = "x" * 300  # longer than a file's name may be


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sound recipe, of a model that is not there, and things that are not what they are named after."""
    monkeypatch.chdir(tmp_path)
    for name in ("QSERVE_WORKSPACE", "QSERVE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    recipe = "model: ./model\ncalibration: {dataset: ./chats.jsonl}\nvariants:\n  int8: {method: rtn, bits: 8}\n"
    (tmp_path / "qserve.yaml").write_text(recipe)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("text")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    """Exit code, and all that is said."""
    done = CliRunner().invoke(app, list(words), prog_name="qserve")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(("words", "code", "sentence"), [
    (("prep", "folder"), 2, "no recipe 'folder': give a YAML file"),
    (("prep", ""), 2, "no recipe '': give a YAML file"),
    (("prep", LONG), 2, "give a YAML file"),
    (("prep", "bytes"), 2, "bytes is no text in UTF-8, so it is no recipe; `qserve init` writes one"),
    (("prep", "text"), 2, "text: a recipe is a mapping"),
    (("prep",), 2, "model"),
    (("prep", "--only", ""), 2, "no variant ''"),
    (("prep", "--only", "int8@vllm"), 2, "'int8@vllm' is a row of a report, the checkpoint int8 served by vllm"),
    (("prep", "--workspace", "text"), 2, "text is no folder that can be written to; choose another with --workspace"),
    (("prep", "--workspace", "text/in"), 2, "is no folder that can be written to"),
    (("bench",), 2, "no checkpoint of bf16 in"),
    (("bench", "--only", "int9"), 2, "no variant 'int9'"),
    (("bench", "--engine", ""), 2, "no engine ''; there are vllm"),
    (("bench", "--engine", "llama-server"), 2, "name it first"),
    (("bench", "--pairs", "0"), 2, "--pairs"),
    (("bench", "--concurrency", "4", "--concurrency", "4"), 2, "bench.concurrency: each concurrency once"),
    (("serve", ""), 2, "no variant ''"),
    (("serve", "int8@vllm"), 2, "serve and bench take --engine vllm"),
    (("serve", "int8"), 2, "no checkpoint of bf16, int8 in"),
    (("serve", "int8", "--host", "no such host"), 2, "cannot listen on no such host"),
    (("serve", "int8", "--port", "65536"), 2, "65535"),
    (("serve", "int8", "--recipe", "folder"), 2, "no recipe 'folder'"),
    (("load",), 2, "give the URL of a server, or --self-test"),
    (("load", ""), 2, "'' is no http or https URL; write http://HOST:PORT"),
    (("load", "ftp://host"), 2, "is no http or https URL"),
    (("load", "http://127.0.0.1:9", "--concurrency", "10001", "--requests", "20000"), 2, "10000"),
    (("load", "http://127.0.0.1:9"), 7, "connection refused; is the server running"),
    (("info", ""), 2, "'' is no http or https URL; write http://HOST:PORT"),
    (("info", "http://127.0.0.1:9"), 6, "nobody answers"),
    (("report",), 2, "`qserve bench` makes one"),
    (("report", "folder"), 2, "No such file or directory; give the folder of a finished run"),
    (("report", "text"), 2, "text: Invalid JSON"),
    (("report", "bytes"), 2, "bytes: Invalid JSON"),
    (("report", LONG), 2, "give the folder of a finished run"),
    (("report", "--format", "pdf"), 2, "'pdf' is not one of"),
    (("choose", "text/in"), 2, "give the folder of a finished run"),
    (("choose", "--recipe", "folder"), 2, "`qserve bench` makes one"),
    (("export", "--for", "compose", "--out", "out"), 2, "`qserve bench` makes one"),
    (("export", "--for", "nomad", "--out", "out"), 2, "'nomad' is not one of"),
    (("publish", "int8", "--dry-run", LONG), 2, "no checkpoint of bf16, int8"),
    (("prep", "--workspace", LONG), 2, "model"),
    (("prep", "--python", LONG), 2, "model"),
    (("publish", "int8@vllm", "--to", "me/x"), 2, "a checkpoint goes by its variant's name alone: int8"),
    (("publish", "--all"), 2, "with --all give the owner alone"),
    (("race", "--engine", "int8@vllm"), 2, "a race names the engine first: vllm:int8"),
    (("race", "--attach", "nowhere"), 2, "is no http or https URL"),
    (("race", "--attach", "http://127.0.0.1:9", "--attach", "http://127.0.0.1:9"), 2, "is there twice"),
    (("race", "--limit-s", "nan"), 2, "--limit-s"),
    (("init", "", "--out", "new.yaml"), 2, "expected a Hub id (owner/name), a path"),
    (("init", "folder", "--out", "new.yaml"), 2, "has no config.json"),
    (("init", "text", "--out", "new.yaml"), 2, "text"),
    (("init", "model", "--out", "new.yaml"), 2, "'model' is no file or folder here"),
    (("init", "~nobody-here/model", "--out", "new.yaml"), 2, "there is no such home folder"),
    (("init", LONG, "--out", "new.yaml"), 2, "is no file or folder here"),
    (("init", "folder", "--out", "text"), 2, "text is there already"),
    (("runtimes", "list", "torch"), 2, "no runtime 'torch'"),
    (("runtimes", "burn"), 2, "'burn' is not one of"),
    (("serv",), 2, "No such command 'serv'"),
])  # fmt: skip
def test_bad_input_is_one_sentence(words: tuple[str, ...], code: int, sentence: str, project: Path) -> None:
    before = sorted(project.rglob("*"))
    assert run(*words)[0] == code, run(*words)
    assert sentence in run(*words)[1].replace("\n", " ")
    assert [path for path in sorted(project.rglob("*")) if path not in before] == []


@pytest.mark.parametrize(("text", "sentence"), [
    ("model: {{name}}\n", "qserve.yaml:1: not valid YAML: a field's name is one word"),
    ("? [a, b]\n: c\n", "not valid YAML: a field's name is one word"),
    ("revision: 2026-13-45\n", "not valid YAML: month must be in 1..12; quote what is meant as text"),
    (f"threads: {'9' * 5000}\n", "quote what is meant as text"),
    ("a: &a [*a]\n", "nested too deeply, or in itself"),
    ("[" * 2000, "nested too deeply, or in itself"),
    ("model: a\x00b\n", "not valid YAML: unacceptable character"),
    ("", "a recipe is a mapping"),
    (f"model: {LONG}\n", "is no file or folder here"),
    ("model: ~nobody-here/model\n", "there is no such home folder"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_read(text: str, sentence: str, project: Path) -> None:
    (project / "qserve.yaml").write_text(text)
    code, said = run("prep")
    assert code == 2 and sentence in said, said
    assert all(line.startswith(("qserve: qserve.yaml", "qserve.yaml:")) for line in said.splitlines())


def test_a_recipe_that_is_a_folder(project: Path) -> None:
    (project / "qserve.yaml").unlink()
    (project / "qserve.yaml").mkdir()
    assert run("prep") == (
        2,
        "qserve: qserve.yaml: cannot read the recipe (Is a directory); `qserve init` writes one\n",
    )


def test_a_cache_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSERVE_CACHE", "text")
    code, said = run("runtimes", "build", "vllm")
    assert code == 4 and "cannot be built in text/runtimes (Not a directory); set QSERVE_CACHE to a folder" in said


def test_a_name_that_is_no_text_ends_nothing(project: Path) -> None:
    write_llama(project / "model")
    code = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
    command = [os.fsencode(sys.executable), b"-c", code.encode(), b"init", b"./model", b"--out", b"\xff.yaml"]
    done = subprocess.run(command, cwd=project, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(b"wrote \\udcff.yaml; next: "), done.stderr
    assert [path for path in project.glob("*.yaml") if os.fsencode(path.name) == b"\xff.yaml"]
