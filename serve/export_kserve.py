"""KServe: a ServingRuntime with the measured settings and an InferenceService that uses it, in Standard mode.

KServe scales by KEDA there: https://kserve.github.io/website/docs/model-serving/generative-inference/autoscaling
"""

from qserve.serve.deployment import MODULE, Deployment
from qserve.serve.export_compose import container_args
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_kubernetes import (
    LOCKED,
    SCRATCH_MOUNTS,
    USER_ID,
    claim,
    model_volume,
    pod_env,
    probes,
    resources,
)
from qserve.serve.export_monitoring import alert_rules, scrape_pods
from qserve.serve.export_text import Plain, head, to_yaml

MOUNTED = "/mnt/models"  # where KServe puts what storageUri names
FORMAT = "vllm"
LABEL = "serving.kserve.io/inferenceservice"  # KServe sets it on every pod of a service


def kserve(deployment: Deployment, prometheus_url: str) -> dict[str, str]:
    """{file name: text}. `prometheus_url` is where KEDA asks for the number of waiting requests."""
    how = (
        "Needs KServe in Standard mode, and KEDA for scaling on waiting requests.",
        "" if deployment.model_repo else "First: fill the volume as model-volume.yaml says.",
        f"Then: kubectl apply -f kserve.yaml. KEDA asks {prometheus_url} (--prometheus-url), which scrapes as "
        "prometheus.yml says.",
        f"The image is {deployment.image}, named after the measured version; qserve measured its own environment of "
        "that version, not this image.",
    )
    objects = (_runtime(deployment), _service(deployment, prometheus_url))
    files = {
        "kserve.yaml": head(deployment, "KServe", *(line for line in how if line)) + to_yaml(*objects),
        "prometheus.yml": scrape_pods(deployment, LABEL),
        "alerts.yml": alert_rules(deployment),
        "dashboard.json": dashboard(deployment),
    }
    return files if deployment.model_repo else files | {"model-volume.yaml": model_volume(deployment)}


def _runtime(deployment: Deployment) -> Plain:
    container: Plain = {
        "name": "kserve-container",  # the name that KServe looks for
        "image": deployment.image,
        "command": ["python3", "-m", MODULE],
        "args": list(container_args(deployment, MOUNTED)),
        "env": pod_env(deployment),
        "ports": [{"name": "http", "containerPort": deployment.port, "protocol": "TCP"}],
        "resources": resources(deployment),
        **probes(deployment),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "10"]}}},
        "securityContext": LOCKED,
        "volumeMounts": SCRATCH_MOUNTS,
    }
    shared: Plain = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    spec: Plain = {
        "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
        "containers": [container],
        "volumes": [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}, shared],
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha1", "kind": "ServingRuntime", "metadata": {"name": deployment.name},
        "spec": spec,
    }  # fmt: skip


def _service(deployment: Deployment, prometheus_url: str) -> Plain:
    annotations = {"serving.kserve.io/deploymentMode": "Standard", "serving.kserve.io/autoscalerClass": "keda"}
    return {
        "apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService",
        "metadata": {"name": deployment.name, "annotations": annotations},
        "spec": {"predictor": _predictor(deployment, prometheus_url)},
    }  # fmt: skip


def _predictor(deployment: Deployment, prometheus_url: str) -> Plain:
    repo = deployment.model_repo
    return {
        "minReplicas": 1,
        "maxReplicas": deployment.max_replicas,
        "terminationGracePeriodSeconds": 10 + deployment.drain_s + 20,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "model": {
            "modelFormat": {"name": FORMAT},
            "runtime": deployment.name,
            "storageUri": f"hf://{repo}" if repo else f"pvc://{claim(deployment)}",
        },
        "autoScaling": {"metrics": [_waiting(deployment, prometheus_url)]},
    }  # fmt: skip


def _waiting(deployment: Deployment, prometheus_url: str) -> Plain:
    """Requests in the queue of all pods; KEDA aims at this many for each pod."""
    metric: Plain = {
        "backend": "prometheus", "serverAddress": prometheus_url,
        "query": f'sum(vllm:num_requests_waiting{{model_name="{deployment.model}"}})',
    }  # fmt: skip
    target: Plain = {"type": "AverageValue", "averageValue": str(max(1, deployment.concurrency // 4))}
    return {"type": "External", "external": {"metric": metric, "target": target}}
