"""llama.cpp's programs: what is refused before any work, and a program of the user's own. The build itself takes 14
minutes of CPU time, so it is checked only where it was made before."""

from pathlib import Path

import pytest

from qserve import llama_cpp
from qserve.errors import RuntimeBuildError, UsageError
from qserve.runtimes import list_runtimes, runtimes_command


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_no_compiler_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    said: list[str] = []
    with pytest.raises(RuntimeBuildError, match=r"no C\+\+ compiler: install one .*serving\.llama_server"):
        llama_cpp.ensure_llama_cpp("cpu", said.append)
    assert said == []
    assert list(tmp_path.iterdir()) == []
    program(tmp_path / "c++", "exit 0")
    with pytest.raises(RuntimeBuildError, match="nvcc"):
        llama_cpp.ensure_llama_cpp("cuda", said.append)


def test_a_build_is_named_by_source_options_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here, source = llama_cpp.thing_of("cpu").digest, llama_cpp.source_digest()
    assert llama_cpp.thing_of("cuda").digest != here
    monkeypatch.setattr(llama_cpp, "instruction_sets", lambda: ("avx2",))
    assert llama_cpp.thing_of("cpu").digest != here
    assert llama_cpp.source_digest() == source  # a checkpoint keeps its name on another machine


def test_the_cuda_build_has_cuda() -> None:
    assert "-DGGML_CUDA=ON" in llama_cpp.options("cuda", "1")
    assert "-DGGML_CUDA=ON" not in llama_cpp.options("cpu", "1")
    assert "-DLLAMA_BUILD_NUMBER=11434" in llama_cpp.options("cpu", "11434")


def test_a_llama_server_on_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = program(tmp_path / "llama-server", "echo 'version: 9999 (abc)' >&2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path, digest = llama_cpp.adopt_llama_server("llama-server")
    assert path == own
    assert llama_cpp.adopt_llama_server(str(own)) == (path, digest)
    program(own, "echo 'version: 10000 (abc)' >&2")
    assert llama_cpp.adopt_llama_server("llama-server")[1] != digest


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "code 3"),
        ("echo hello", "named no build of llama.cpp, .* give the path of one"),
        ("echo 'version: 1'; exit 1", "code 1"),
    ],
)
def test_another_program_is_refused(tmp_path: Path, script: str, words: str) -> None:
    own = program(tmp_path / "llama-server", script)
    with pytest.raises(UsageError, match=f"is no llama-server that works: .*{words}"):
        llama_cpp.adopt_llama_server(str(own))
    with pytest.raises(UsageError, match="is no program here"):
        llama_cpp.adopt_llama_server(str(tmp_path / "nothing"))


def test_it_is_among_the_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSERVE_CACHE", str(tmp_path))
    assert list(runtimes_command("check", "llama.cpp", print))[-1].endswith("not built")
    folder = llama_cpp.thing_of("cpu").folder
    (folder / "bin").mkdir(parents=True)
    program(folder / "bin" / "llama-server", "echo 'version: 11434 (x)'")
    (folder / "runtime.json").write_text(
        '{"name": "llama.cpp-cpu", "digest": "d", "packages": {"llama.cpp": "11434"}, "size_bytes": 38123456, '
        '"built": "now", "build_s": 1}'
    )
    assert [(info.name, info.status) for info in list_runtimes()] == [("llama.cpp-cpu", "current")]
    assert "  38.1 MB  built now" in next(iter(runtimes_command("list", "llama.cpp", print)))
    monkeypatch.setenv("QSERVE_FLAVOUR", "cpu")
    assert "works: llama.cpp-cpu" in "".join(runtimes_command("check", "llama.cpp", print))
    assert "build 11434" in "".join(runtimes_command("build", "llama.cpp", print))
    program(folder / "bin" / "llama-server", "exit 1")
    with pytest.raises(RuntimeBuildError, match="no longer works"):
        list(runtimes_command("check", "llama.cpp", print))


def test_the_build_that_is_here() -> None:
    found = llama_cpp.find_llama_cpp(llama_cpp.thing_of("cpu"))
    if found is None:
        pytest.skip("llama.cpp is not built in this cache: `qserve runtimes build llama.cpp` takes 14 minutes of CPU")
    assert found.version == llama_cpp.version_of(found.server) == "11434"
    assert found.converter.is_file()
    assert found.quantize.is_file()
