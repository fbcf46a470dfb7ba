"""KServe: a ServingRuntime with the measured settings and an InferenceService that uses it, in Standard mode.

KServe scales by KEDA there: https://kserve.github.io/website/docs/model-serving/generative-inference/autoscaling
"""

from qserve.serve.deployment import Deployment
from qserve.serve.export_container import container_notes
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_monitoring import alert_rules, scrape_pods, selector
from qserve.serve.export_pod import POD_SECURITY, SCRATCH_VOLUMES, container, grace_s, run_target, wait_target
from qserve.serve.export_text import Plain, head, to_yaml
from qserve.serve.export_volume import claim, model_volume

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
        *container_notes(deployment),
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
    spec: Plain = {
        "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
        "containers": [container(deployment, "kserve-container", MOUNTED)],  # the name that KServe looks for
        "volumes": SCRATCH_VOLUMES,
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
        "terminationGracePeriodSeconds": grace_s(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "model": {
            "modelFormat": {"name": FORMAT},
            "runtime": deployment.name,
            "storageUri": f"hf://{repo}" if repo else f"pvc://{claim(deployment)}",
        },
        "autoScaling": {"metrics": _scaling(deployment, prometheus_url)},
    }  # fmt: skip


def _scaling(deployment: Deployment, prometheus_url: str) -> list[Plain]:
    """As on Kubernetes alone: up when requests wait, down when fewer servers would do for those that run."""
    return [
        _requests(deployment, prometheus_url, "waiting", wait_target(deployment)),
        _requests(deployment, prometheus_url, "running", run_target(deployment)),
    ]


def _requests(deployment: Deployment, prometheus_url: str, state: str, a_server: int) -> Plain:
    """Requests of all servers in one state. KServe hands `value` to KEDA as the threshold, which KEDA takes as so many
    for each server; KServe reads no other kind of target (its keda_reconciler.go)."""
    query = f"sum(vllm:num_requests_{state}{selector(deployment)})"
    metric: Plain = {"backend": "prometheus", "serverAddress": prometheus_url, "query": query}
    target: Plain = {"type": "Value", "value": str(a_server)}
    return {"type": "External", "external": {"metric": metric, "target": target}}
