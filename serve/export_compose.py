"""Docker Compose: vLLM's container with the measured settings; Prometheus and Grafana in the profile `monitoring`.

https://docs.docker.com/reference/compose-file/
"""

from qserve.serve.deployment import MODULE, Deployment
from qserve.serve.export_container import container_args, container_env, container_notes
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_monitoring import alert_rules, scrape_static
from qserve.serve.export_text import Plain, head, to_yaml

PROMETHEUS = "prom/prometheus:v3.5.0"
GRAFANA = "grafana/grafana:12.1.0"
CONFIG = "/etc/prometheus"
PROVISIONING = "/etc/grafana/provisioning"


def compose(deployment: Deployment) -> dict[str, str]:
    """{file name: text}."""
    services: Plain = {"vllm": _vllm(deployment), "prometheus": _prometheus(), "grafana": _grafana()}
    whole: Plain = {"name": deployment.name, "services": services, "volumes": {"cache": {}}}
    start = (
        "Start: docker compose up --detach --wait. With graphs (Grafana on port 3000): add --profile monitoring",
        *container_notes(deployment),
        *(() if deployment.cuda else ("cpuset and VLLM_CPU_OMP_THREADS_BIND name cores of the measured machine.",)),
    )
    return {
        "compose.yaml": head(deployment, "Docker Compose", *start) + to_yaml(whole),
        "prometheus.yml": scrape_static(deployment, f"vllm:{deployment.port}"),
        "alerts.yml": alert_rules(deployment),
        "dashboard.json": dashboard(deployment),
        "grafana-datasource.yml": to_yaml(_datasource()),
        "grafana-dashboards.yml": to_yaml(_provider()),
    }


def _vllm(deployment: Deployment) -> Plain:
    health = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{deployment.port}/health', timeout=5)"
    service: Plain = {
        "image": deployment.image,
        "entrypoint": ["python3", "-m", MODULE],
        "command": [_literal(arg) for arg in container_args(deployment, "/model")],
        "environment": {name: _literal(value) for name, value in container_env(deployment).items()},
        "ports": [f"127.0.0.1:{deployment.port}:{deployment.port}"],
        "volumes": [_model(deployment), {"type": "volume", "source": "cache", "target": "/root/.cache"}],
        "healthcheck": {
            "test": ["CMD", "python3", "-c", health], "interval": "10s", "timeout": "6s", "retries": 3,
            "start_period": f"{deployment.start_timeout_s}s", "start_interval": "2s",
        },
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{deployment.drain_s + 20}s",
        "restart": "unless-stopped",
        "shm_size": "1gb",
        "security_opt": ["no-new-privileges:true"],
    }  # fmt: skip
    if deployment.memory_bytes is not None:
        service |= {"mem_limit": f"{deployment.memory_bytes // 2**20}m"}
    return service | (_gpus(deployment) if deployment.cuda else _cores(deployment))


def _model(deployment: Deployment) -> Plain:
    source = _literal(str(deployment.folder))
    return {"type": "bind", "source": source, "target": "/model", "read_only": True,
            "bind": {"create_host_path": False}}  # fmt: skip


def _gpus(deployment: Deployment) -> Plain:
    devices = [{"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}]
    return {"deploy": {"resources": {"reservations": {"devices": devices}}}}


def _cores(deployment: Deployment) -> Plain:
    """The cores that computed when it was measured; SYS_NICE lets vLLM bind memory to them."""
    bound = deployment.env.get("VLLM_CPU_OMP_THREADS_BIND")
    return {"cap_add": ["SYS_NICE"], **({"cpuset": bound} if bound else {})}


def _prometheus() -> Plain:
    files = [f"./{name}:{CONFIG}/{name}:ro" for name in ("prometheus.yml", "alerts.yml")]
    return {"image": PROMETHEUS, "profiles": ["monitoring"], "volumes": files, "restart": "unless-stopped"}


def _grafana() -> Plain:
    files = [
        f"./grafana-datasource.yml:{PROVISIONING}/datasources/qserve.yml:ro",
        f"./grafana-dashboards.yml:{PROVISIONING}/dashboards/qserve.yml:ro",
        "./dashboard.json:/var/lib/grafana/dashboards/qserve.json:ro",
    ]
    return {"image": GRAFANA, "profiles": ["monitoring"], "ports": ["127.0.0.1:3000:3000"], "volumes": files,
            "restart": "unless-stopped"}  # fmt: skip


def _datasource() -> Plain:
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090", "isDefault": True}
    return {"apiVersion": 1, "datasources": [source]}


def _provider() -> Plain:
    provider = {"name": "qserve", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {"apiVersion": 1, "providers": [provider]}


def _literal(text: str) -> str:
    """Compose fills in $NAME; a dollar is written twice."""
    return text.replace("$", "$$")
