"""`qserve race` through the front door: a tiny random llama, the real transformers, a server that runs already.

Builds llm-compressor's environment if this machine has none yet.
"""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from tiny import write_corpus, write_llama

from qserve.eval.null_server import null_server
from qserve.eval.race import Race
from qserve.race import choose_entries, with_gguf
from qserve.recipe import find_recipe, load_recipe

HEAT = ("--requests", "6", "--concurrency", "6", "--rounds", "4", "--limit-s", "120")


def qserve(*words: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    code = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with the baseline of a tiny model in it."""
    folder = tmp_path_factory.mktemp("race")
    write_llama(folder / "model")
    write_corpus(folder / "corpus.jsonl")
    recipe = {
        "model": "./model",
        "calibration": {"dataset": "./corpus.jsonl", "samples": 4, "tokens": 64, "min_tokens": 8},
        "variants": {"int8": {"method": "gptq", "bits": 8, "activations": "int8"}},
        "bench": {"prompt_tokens": 24, "output_tokens": 6, "concurrency": [1]},
        "quality": {"windows": 1, "tokens": 64},
    }
    (folder / "qserve.yaml").write_text(yaml.safe_dump(recipe))
    qserve("prep", "--only", "bf16", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def race(project: Path) -> Race:
    with null_server() as url:
        words = ("--engine", "transformers", "--engine", "pipeline", "--attach", url, *HEAT)
        done = qserve("race", *words, "--format", "json", cwd=project)
    return Race.model_validate_json(done.stdout)


def test_every_engine_does_the_same_work(race: Race) -> None:
    assert [r.status for r in race.racers] == ["measured"] * 3, [r.problem for r in race.racers]
    for racer in race.racers:
        assert racer.load
        assert racer.load.valid, racer.load.problem
        assert (racer.load.ok, racer.load.output_tokens) == (24, 24 * 6)
        assert racer.load.delivered_concurrency == 6
        assert len(racer.rounds_tokens_per_s) == 4
    naive, pipeline, attached = race.racers
    assert naive.throughput is None
    for racer in (pipeline, attached):
        assert racer.throughput and racer.throughput.pairs == 4 and racer.throughput.low
    assert attached.throughput and attached.throughput.verdict == "faster"  # it computes nothing


def test_what_is_known_of_each(race: Race) -> None:
    naive, pipeline, attached = race.racers
    for racer in (naive, pipeline):
        assert len(racer.startups_s) == 2  # one a pass
        assert racer.version and racer.kernels
        assert racer.memory and racer.memory.peak_bytes and racer.memory.peak_bytes > 10**8
        assert racer.load and racer.load.ttft_s.p95
    assert (attached.startups_s, attached.version, attached.kernels, attached.memory) == ((), None, (), None)
    assert attached.load and attached.load.server_cpu is None


def test_the_run_folder(race: Race, project: Path) -> None:
    folder = project / "qserve-workspace" / "runs" / race.run
    assert Race.read(folder / "race.json") == race
    assert "<svg" in (folder / "race.html").read_text()
    rows = pq.read_table(folder / "requests.parquet").to_pylist()
    assert len(rows) == 3 * 24
    assert {row["variant"] for row in rows} == {r.name for r in race.racers}
    logs = sorted(path.name for path in folder.glob("server-*.log"))
    assert logs == [f"server-{name}-{n}.log" for name in ("pipeline", "transformers") for n in (1, 2)]


def test_an_interrupted_race_goes_on(race: Race, project: Path) -> None:
    folder = project / "qserve-workspace" / "runs" / race.run
    began = folder / "leg-transformers-1.json"
    before = began.read_bytes()
    words = ("race", "--engine", "pipeline", "--requests", "2", "--concurrency", "2", "--rounds", "2")
    first = qserve(*words, cwd=project)
    (own,) = [p.parent for p in folder.parent.glob("*/race.json") if p.parent != folder]
    (own / "race.json").unlink()
    (own / "leg-pipeline-2.json").unlink()
    kept = (own / "leg-pipeline-1.json").stat().st_mtime_ns
    again = qserve(*words, cwd=project)
    assert f"going on with the unfinished race {own.name}" in again.stderr
    assert again.stderr.count("starting ") == 1
    assert (own / "leg-pipeline-1.json").stat().st_mtime_ns == kept
    assert began.read_bytes() == before  # another race is another folder
    assert first.stdout.splitlines()[2] == again.stdout.splitlines()[2]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--engine", "nothing"), 2, "no engine 'nothing'"),
        (("--engine", "vllm", "--engine", "vllm:bf16"), 2, "--engine vllm:bf16 is there twice"),
        (("--engine", "transformers:int8"), 2, "no checkpoint of int8"),
        (("--engine", "int8@vllm"), 2, "a race names the engine first: vllm:int8"),
        (("--engine", "transformers", "--attach", "http://127.0.0.1:9"), 6, "nobody answers"),
        (("--requests", "2", "--concurrency", "4"), 2, "2 requests cannot keep 4 in flight"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(project: Path, words: tuple[str, ...], code: int, says: str) -> None:
    done = qserve("race", *words, cwd=project, expect=code)
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_which_checkpoint_an_engine_serves() -> None:
    recipe = load_recipe(find_recipe("quickstart"))
    assert choose_entries(("transformers", "vllm:int8"), recipe) == (("transformers", "bf16"), ("vllm", "int8"))
    assert [name for name, _ in choose_entries((), recipe)] == ["transformers", "pipeline", "vllm"]
    twice = choose_entries(("transformers", "transformers:int8"), recipe)
    assert twice == (("transformers", "bf16"), ("transformers", "int8"))
    with_file = with_gguf(recipe, ("llama-server",))
    assert choose_entries(("llama-server",), with_file) == (("llama-server", "gguf-bf16"),)
    assert with_gguf(with_file, ("llama-server",)) == with_file  # it has one
    assert with_gguf(recipe, ("vllm",)) == recipe


def test_info_of_a_server_that_says_little(project: Path) -> None:
    with null_server() as url:
        info = json.loads(qserve("info", url, "--format", "json", cwd=project).stdout)
    assert (info["model"], info["engine"], info["running"]) == ("null", None, None)
    assert "nobody answers" in qserve("info", "http://127.0.0.1:9", cwd=project, expect=6).stderr
