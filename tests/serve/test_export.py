"""`qserve export` through the command line, from a real run's measurements; each target checked by its own tool.

docker-compose, kubernetes-validate and Grafana's SDK come with the `test` extra, KServe's schema out of its SDK on
PyPI; systemd-analyze and promtool are of the system: without them their tests are skipped, and say so.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import kserve_schema
import kubernetes_validate
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

HERE = Path(__file__).parent
COMPOSE = Path(sys.executable).with_name("docker-compose")
KUBERNETES = "1.35"  # an older release's schema: what it takes, newer ones take
MANIFEST = {
    "format": 1, "variant": "int8", "digest": "0" * 12, "settings": {}, "label": "GPTQ W8A8 int8", "model": "m",
    "revision": None, "source_sha256": "0", "source_note": None, "calibration": None, "runtime": "r", "packages": {},
    "qserve_version": "0", "layers": 1, "layers_fallback": [], "wall_s": 1.0, "peak_memory_bytes": None, "threads": 1,
    "weights": {"total_bytes": 1, "quantized_bytes": 1, "embedding_bytes": 0, "other_bytes": 0, "parameters": 1,
                "bits_per_parameter": 8.0},
    "created": "2026-11-30T00:00:00Z", "files": [],
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder whose name holds all that shells, units and Compose read as something else."""
    folder = tmp_path / "a b" / "$HOME %h 'x' int8-1"
    folder.mkdir(parents=True)
    (folder / "qserve.json").write_text(json.dumps(MANIFEST))
    return folder


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Path:
    """The run folder of real measurements, with the checkpoint and the Python of this test in their commands."""
    report = json.loads((HERE / "measurements.json").read_text())
    (int8,) = (v for v in report["variants"] if v["name"] == "int8")
    command = int8["server"]["command"]
    command[0], command[command.index("--model") + 1] = sys.executable, str(checkpoint)
    return write(tmp_path / "run", report)


def write(folder: Path, report: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "measurements.json").write_text(json.dumps(report))
    return folder


def export(run: Path, target: str, *more: str, variant: str = "int8") -> "subprocess.CompletedProcess[str]":
    out = run.parent / target
    command = [sys.executable, "-m", "qserve.cli", "export", variant, "--for", target, "--out", str(out)]
    return subprocess.run([*command, "--run", str(run), *more], capture_output=True, text=True, check=False)


def exported(run: Path, target: str, *more: str) -> Path:
    done = export(run, target, *more)
    assert done.returncode == 0, done.stderr
    folder = run.parent / target
    assert sorted(done.stdout.split("\n"))[1:] == sorted(str(p) for p in folder.iterdir())
    return folder


def documents(path: Path) -> dict[str, dict[str, object]]:
    """{kind: document}."""
    return {d["kind"]: d for d in yaml.safe_load_all(path.read_text())}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


# --- each target by its own tool ----------
def test_compose_is_what_compose_reads(run: Path, checkpoint: Path) -> None:
    folder = exported(run, "compose", "--slo", "ttft_p95=2")
    command = [COMPOSE, "--profile", "monitoring", "config", "--format", "json"]
    read = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)
    vllm = read["services"]["vllm"]
    text = " ".join(vllm["command"])
    assert text.startswith("--model /model --served-model-name int8 --host 0.0.0.0 --port 8000 --dtype bfloat16 ")
    assert text.endswith("--enforce-eager --max-num-seqs 8 --shutdown-timeout 60")
    assert vllm["volumes"][0]["source"].replace("$$", "$") == str(checkpoint)
    assert vllm["volumes"][0]["read_only"]
    assert vllm["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert (vllm["cpuset"], vllm["mem_limit"]) == ("0,1", str(5632 * 2**20))
    assert vllm["healthcheck"]["start_period"] == "2m22s"  # three times the 47 s that were measured
    assert set(read["services"]) == {"vllm", "prometheus", "grafana"}
    mounted = [v["source"] for s in ("prometheus", "grafana") for v in read["services"][s]["volumes"]]
    assert len(mounted) == 5
    assert all(Path(path).is_file() for path in mounted)


def test_systemd_takes_the_unit_and_gives_vllm_its_words(run: Path, checkpoint: Path) -> None:
    unit = exported(run, "systemd") / "qserve-int8.service"
    text = unit.read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = [w[1:-1] if w.startswith('"') else w for w in re.findall(r'"(?:[^"\\]|\\.)*"|\S+', start)]
    plain = [re.sub(r"\\(.)", r"\1", w).replace("%%", "%").replace("$$", "$") for w in words]
    assert plain[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert plain[4] == str(checkpoint)
    assert plain[-2:] == ["--shutdown-timeout", "60"]
    assert "VLLM_CPU_OMP_THREADS_BIND=0,1" in text
    verify = [tool("systemd-analyze"), "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


@pytest.mark.parametrize("repo", [(), ("--model-repo", "me/int8")])
def test_kubernetes_schemas_take_every_object(run: Path, repo: tuple[str, ...]) -> None:
    folder = exported(run, "kubernetes", *repo)
    objects = documents(folder / "kubernetes.yaml")
    assert set(objects) == {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    volume = folder / "model-volume.yaml"
    assert volume.exists() != bool(repo)
    if volume.exists():
        objects |= documents(volume)
    for one in objects.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    pod = objects["Deployment"]["spec"]["template"]["spec"]  # type: ignore[index]
    (vllm,) = pod["containers"]
    assert vllm["resources"]["limits"] == {"cpu": "2", "memory": "5632Mi"}
    assert vllm["startupProbe"]["periodSeconds"] * vllm["startupProbe"]["failureThreshold"] >= 3 * 47
    assert pod["terminationGracePeriodSeconds"] == 10 + 60 + 20
    assert [c["command"][:3] for c in pod.get("initContainers", [])] == (
        [["hf", "download", "me/int8"]] if repo else []
    )


def test_a_field_that_kubernetes_does_not_know_is_seen(run: Path) -> None:
    deployment = documents(exported(run, "kubernetes") / "kubernetes.yaml")["Deployment"]
    deployment["spec"]["template"]["spec"]["graceSeconds"] = 1  # type: ignore[index]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


@pytest.fixture(scope="module")
def kserve_sdk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    try:
        sdk = kserve_schema.download(tmp_path_factory.mktemp("kserve"))
    except subprocess.SubprocessError:
        pytest.skip("KServe's SDK cannot be had from the package index")
    with sdk:
        yield sdk


def test_kserves_schema_takes_both_objects(run: Path, kserve_sdk: zipfile.ZipFile) -> None:
    both = documents(exported(run, "kserve") / "kserve.yaml")
    for kind, model in (("ServingRuntime", "V1alpha1"), ("InferenceService", "V1beta1")):
        assert list(kserve_schema.problems(kserve_sdk, model + kind, both[kind])) == []
    spec = both["ServingRuntime"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
           "spec": {"containers": spec["containers"], "volumes": spec["volumes"]}}  # fmt: skip  # type: ignore[index]
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    predictor = both["InferenceService"]["spec"]["predictor"]  # type: ignore[index]
    targets = [m["external"]["target"] for m in predictor["autoScaling"]["metrics"]]
    assert targets == [
        {"type": "Value", "value": "2"},
        {"type": "Value", "value": "6"},
    ]  # all that KServe hands to KEDA
    predictor["modle"] = {}
    wrong = list(kserve_schema.problems(kserve_sdk, "V1beta1InferenceService", both["InferenceService"]))
    assert wrong == [".spec.predictor.modle is no field"]


@pytest.mark.parametrize("target", ["compose", "systemd", "kubernetes", "kserve"])
def test_prometheus_takes_scrape_config_and_alerts(run: Path, target: str) -> None:
    promtool, folder = tool("promtool"), exported(run, target, "--slo", "ttft_p95=2")
    config = folder / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", str(config)], capture_output=True, text=True, check=False)
    if "field kubernetes_sd_configs not found" in done.stderr + done.stdout:  # Debian builds it without
        parsed = yaml.safe_load(config.read_text())
        assert parsed["scrape_configs"][0].pop("kubernetes_sd_configs") == [{"role": "pod"}]
        parsed["scrape_configs"][0]["static_configs"] = [{"targets": ["pod:8000"]}]
        config.write_text(yaml.safe_dump(parsed))
        done = subprocess.run([promtool, "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 rules found" in done.stdout


ALERT_TEST = {
    "rule_files": ["alerts.yml"],
    "tests": [{
        "interval": "1m",
        "input_series": [
            {"series": 'vllm:num_requests_waiting{model_name="int8"}', "values": "20x30"},
            {"series": 'vllm:time_to_first_token_seconds_bucket{model_name="int8",le="1"}', "values": "0+1x30"},
            {"series": 'vllm:time_to_first_token_seconds_bucket{model_name="int8",le="5"}', "values": "0+10x30"},
            {"series": 'vllm:time_to_first_token_seconds_bucket{model_name="int8",le="+Inf"}', "values": "0+10x30"},
            {"series": 'up{job="qserve-int8"}', "values": "1x30"},
        ],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": name, "exp_alerts": [{"exp_labels": {"severity": "warning"}}] * on}
            for name, on in (("QserveRequestsWait", True), ("QserveTimeToFirstToken", True), ("QserveDown", False),
                             ("QserveInterTokenLatency", False))
        ],
    }],
}  # fmt: skip


def test_alerts_fire_when_the_slo_is_missed(run: Path) -> None:
    promtool, folder = tool("promtool"), exported(run, "compose", "--slo", "ttft_p95=2")
    rules = yaml.safe_load((folder / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations")  # the test would have to repeat their sentences
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "test.yml").write_text(yaml.safe_dump(ALERT_TEST))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def lost(before: object, after: object, at: str = "") -> Iterator[str]:
    """What Grafana's types did not keep."""
    if isinstance(before, Mapping):
        for key, value in before.items():
            if not isinstance(after, Mapping) or key not in after:
                yield f"{at}/{key}"
            else:
                yield from lost(value, after[key], f"{at}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for n, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{at}/{n}")
    elif before != after:
        yield at


def test_grafanas_types_keep_every_field_of_the_dashboard(run: Path) -> None:
    made = json.loads((exported(run, "compose", "--slo", "ttft_p95=2") / "dashboard.json").read_text())
    assert list(lost(made, json.loads(JSONEncoder().encode(Dashboard.from_json(made))))) == []
    assert len(made["panels"]) == 8
    ttft, itl = made["panels"][:2]
    assert ttft["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] == 2
    assert "twice the measured p95" in itl["description"]
    typo = made | {"panells": []}
    assert list(lost(typo, json.loads(JSONEncoder().encode(Dashboard.from_json(typo))))) == ["/panells"]


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_every_metric_is_one_that_vllm_has(run: Path, name: str) -> None:
    """vllm-metrics.txt: the names in /metrics of a served int8 checkpoint, vLLM 0.32.0."""
    known = set((HERE / "vllm-metrics.txt").read_text().split())
    used = set(re.findall(r"vllm:\w+", (exported(run, "compose") / name).read_text()))
    assert len(used) >= 4
    assert used - known - {metric.removesuffix("_bucket") for metric in known} == set()


# --- what it refuses, and what it says ----------
@pytest.mark.parametrize(
    ("variant", "more", "code", "says"),
    [
        ("int9", (), 2, "did you mean int8?"),
        ("int8@vllm", (), 2, "did you mean int8?"),
        ("", (), 2, "no variant ''"),
        ("fp8", (), 3, "fp8 was not measured in run 20261130-161948-6bea5660a9c5"),
        ("int8", ("--slo", "ttft_p95=0.1"), 3, "met the SLO at no measured concurrency"),
        ("int8", ("--slo", "ttft=1"), 2, "did you mean one of"),
        ("int8", ("--slo", "ttft_p95=soon"), 2, "write NAME=NUMBER"),
        ("int8", ("--name", "9"), 2, "give --name"),
        ("int8", ("--image", "my image"), 2, "--image is 'my image'; give one as REGISTRY/NAME:TAG"),
        ("int8", ("--prometheus-url", "prometheus"), 2, "give one as http://HOST:PORT"),
        ("int8", ("--model-repo", "me/x"), 2, "--model-repo is for kubernetes and kserve"),
        ("bf16", (), 2, "is not here; run `qserve prep`"),
    ],
)
def test_refusals(run: Path, variant: str, more: tuple[str, ...], code: int, says: str) -> None:
    done = export(run, "compose", *more, variant=variant)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert not (run.parent / "compose").exists()


def test_a_file_that_differs_is_kept_unless_forced(run: Path) -> None:
    folder = exported(run, "compose")
    assert export(run, "compose").returncode == 0  # the same again
    mine = folder / "alerts.yml"
    mine.write_text("mine")
    refused = export(run, "compose")
    assert refused.returncode == 2
    assert f"{mine} would change" in refused.stderr
    assert mine.read_text() == "mine"
    assert export(run, "compose", "--force").returncode == 0
    assert mine.read_text() != "mine"


def test_a_command_in_a_comment_can_be_pasted(run: Path, checkpoint: Path) -> None:
    text = (exported(run, "kubernetes") / "model-volume.yaml").read_text()
    (copy,) = [line for line in text.splitlines() if "kubectl cp " in line]
    assert shlex.split(copy.removeprefix("# ")) == ["kubectl", "cp", f"{checkpoint}/.", "qserve-int8-loader:/models"]
    unit = (exported(run, "systemd") / "qserve-int8.service").read_text()
    assert " && systemctl enable --now qserve-int8.service\n" in unit


def test_every_file_says_what_was_measured_and_what_differs(run: Path) -> None:
    folder = exported(run, "kubernetes", "--name", "My Chat_bot!", "--kv-cache-gib", "6")
    text = (folder / "kubernetes.yaml").read_text()
    assert "Run 20261130-161948-6bea5660a9c5 of 2026-11-30" in text
    assert "# - --max-num-seqs 8" in text
    assert "# - VLLM_CPU_KVCACHE_SPACE 6 instead of 3: asked for" in text
    assert "memory: 8704Mi" in text  # three GiB more than with what was measured
    assert documents(folder / "kubernetes.yaml")["Service"]["metadata"]["name"] == "my-chat-bot"  # type: ignore[index]


def test_a_kv_cache_beyond_the_measured_machine(run: Path) -> None:
    """It has 23.5 GiB; with 3 GiB of KV cache a server took 4.9. A cluster may have larger nodes, and is told."""
    assert export(run, "compose", "--kv-cache-gib", "21").returncode == 0
    for target in ("compose", "systemd"):
        done = export(run, target, "--kv-cache-gib", "22", "--force")
        assert (done.returncode, done.stdout) == (3, "")
        assert (
            "may use 24.5 GiB of memory, and the measured machine has 23.5 GiB: there --kv-cache-gib may be 21 at "
            in (done.stderr)
        )
    for target in ("kubernetes", "kserve"):
        done = export(run, target, "--kv-cache-gib", "100")
        assert done.returncode == 0
        assert (
            "a node needs that much memory free: with a KV cache of 100 GiB a server may use 102.5 GiB" in done.stderr
        )
        assert "memory: 104960Mi" in (run.parent / target / f"{target}.yaml").read_text()


def test_a_checkpoint_under_two_engines_is_named_by_its_row(run: Path) -> None:
    report = json.loads((run / "measurements.json").read_text())
    (int8,) = (v for v in report["variants"] if v["name"] == "int8")
    under = json.loads(json.dumps(int8)) | {"name": "int8@vllm"}
    int8["server"]["engine"] = "transformers"
    write(run, report)
    assert (
        "int8 was served by transformers, and only vLLM is exported; measure it with `qserve bench --engine vllm`"
        in (export(run, "compose").stderr)
    )
    report["variants"].append(under)
    write(run, report)
    assert "vLLM's row of it is int8@vllm" in export(run, "compose").stderr
    assert export(run, "compose", variant="int8@vllm").returncode == 0


def unnamed(run: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "qserve.cli", "export", "--for", "compose", "--out", str(run.parent / "chosen")]
    return subprocess.run([*command, "--run", str(run)], capture_output=True, text=True, check=False)


def test_without_a_name_it_is_what_choose_chooses(run: Path) -> None:
    """The real run resolves nothing, so nothing is exported; with the intervals that more pairs would give, int8 is."""
    undecided = unnamed(run)
    assert undecided.returncode == 3
    assert "Unresolved: " in undecided.stderr
    assert "Name the variant to export" in undecided.stderr
    report = json.loads((run / "measurements.json").read_text())
    for point in next(v for v in report["variants"] if v["name"] == "int8")["points"]:
        point["throughput"] |= {"value": 1.6, "low": 1.5, "high": 1.7, "verdict": "faster", "pairs": 8}
    done = unnamed(write(run, report))
    assert done.returncode == 0, done.stderr
    assert "Deploy int8" in done.stderr
    assert "--served-model-name\n    - int8\n" in (run.parent / "chosen" / "compose.yaml").read_text()


def test_a_smoke_run_is_refused(run: Path) -> None:
    refused = export(write(run, json.loads((run / "measurements.json").read_text()) | {"quick": True}), "compose")
    assert refused.returncode == 2
    assert "is a smoke run, whose figures stand for nothing" in refused.stderr


def test_a_gpu_of_its_own(run: Path, checkpoint: Path) -> None:
    """The CUDA flavour as text: devices, image, and the GPU memory that was shared when it was measured."""
    report = json.loads((run / "measurements.json").read_text())
    report["machine"] |= {"flavour": "cuda", "gpus": ["NVIDIA H200"], "gpu_memory_bytes": 2**37}
    (int8,) = (v for v in report["variants"] if v["name"] == "int8")
    int8["server"]["env"] = {"HF_HUB_OFFLINE": "1"}
    int8["server"]["command"] += ["--gpu-memory-utilization", "0.45"]
    refused = export(write(run, report), "compose", "--kv-cache-gib", "4")
    assert (refused.returncode, refused.stdout) == (2, "") and "--kv-cache-gib is for CPUs" in refused.stderr
    folder = exported(run, "compose")
    vllm = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["vllm"]
    assert vllm["image"] == "vllm/vllm-openai:v0.32.0"
    assert vllm["command"][vllm["command"].index("--gpu-memory-utilization") + 1] == "0.9"
    assert vllm["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1
    assert "cpuset" not in vllm
    subprocess.run([COMPOSE, "config", "--quiet"], cwd=folder, check=True)
    pod = documents(exported(run, "kubernetes") / "kubernetes.yaml")["Deployment"]
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    assert "nvidia.com/gpu: 1" in (run.parent / "kubernetes" / "kubernetes.yaml").read_text()


def test_a_file_of_the_machine_is_no_part_of_a_container(run: Path) -> None:
    report = json.loads((run / "measurements.json").read_text())
    (int8,) = (v for v in report["variants"] if v["name"] == "int8")
    int8["server"]["env"]["LD_PRELOAD"] = "/home/me/libiomp5.so"
    text = (exported(write(run, report), "kubernetes") / "kubernetes.yaml").read_text()
    assert text.count("LD_PRELOAD") == 1  # in the head, which says that it is left out
    int8["server"]["command"] += ["--chat-template", "/home/me/chat.jinja"]
    done = export(write(run, report), "compose")
    assert done.returncode == 2
    assert "--chat-template /home/me/chat.jinja is a file of this machine" in done.stderr
    unit = (exported(run, "systemd") / "qserve-int8.service").read_text()
    assert "\nEnvironment=LD_PRELOAD=/home/me/libiomp5.so\n" in unit
