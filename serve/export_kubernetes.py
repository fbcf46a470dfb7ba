"""Kubernetes: Deployment, Service, PodDisruptionBudget, HorizontalPodAutoscaler, and the volume of the checkpoint.

Scaling is a HorizontalPodAutoscaler (autoscaling/v2, in every cluster) on vLLM's own queue, through the custom metrics
API of prometheus-adapter. KEDA would do it in one object, but a cluster without its CRDs refuses that object; without
the adapter this Deployment still runs, and only does not scale.
"""

import math

from qserve.serve.deployment import GIB, MODULE, Deployment
from qserve.serve.export_compose import container_args, container_env
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_monitoring import alert_rules, scrape_pods
from qserve.serve.export_text import Plain, head, to_yaml

NAME_LABEL = "app.kubernetes.io/instance"
LEAVE_S = 10  # a pod that stops is still sent requests until every proxy has heard of it
MODEL_PATH = "/models"
HOME = "/cache"
USER_ID = 1000


def kubernetes(deployment: Deployment) -> dict[str, str]:
    """{file name: text}."""
    objects = (_deployment(deployment), _service(deployment), _disruption(deployment), _autoscaler(deployment))
    adapter = (
        f"Install: helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter -f {ADAPTER}",
    )
    files = {
        "kubernetes.yaml": head(deployment, "Kubernetes", *_how(deployment)) + to_yaml(*objects),
        "prometheus.yml": scrape_pods(deployment, NAME_LABEL),
        "alerts.yml": alert_rules(deployment),
        "dashboard.json": dashboard(deployment),
        ADAPTER: head(deployment, "Helm values of prometheus-adapter", *adapter) + to_yaml(_adapter_rules()),
    }
    return files if deployment.model_repo else files | {"model-volume.yaml": model_volume(deployment)}


ADAPTER = "prometheus-adapter-values.yaml"


def _how(deployment: Deployment) -> tuple[str, ...]:
    if deployment.model_repo:
        model = f"Each pod downloads {deployment.model_repo}; a token, if it needs one: secret {deployment.name}-hub."
    else:
        model = "First: fill the volume as model-volume.yaml says. Then: kubectl apply -f kubernetes.yaml"
    return (
        model,
        f"Scaling needs prometheus-adapter with {ADAPTER}, which serves vLLM's queue as a custom metric.",
        f"The image is {deployment.image}, named after the measured version; qserve measured its own environment of "
        "that version, not this image.",
        *_binding_change(deployment),
    )


def _binding_change(deployment: Deployment) -> tuple[str, ...]:
    if deployment.cuda:
        return ()
    return (
        f"VLLM_CPU_OMP_THREADS_BIND is nobind: a pod cannot know its cores; {deployment.cores} threads compute, as "
        "measured, within the same number of CPUs (the kubelet's static CPU manager pins them).",
    )


# --- the pod ----------
def _labels(deployment: Deployment) -> Plain:
    return {"app.kubernetes.io/name": "vllm", NAME_LABEL: deployment.name}


def _meta(deployment: Deployment) -> Plain:
    return {"name": deployment.name, "labels": _labels(deployment)}


def _deployment(deployment: Deployment) -> Plain:
    spec: Plain = {
        # no replicas: the autoscaler owns that number
        "selector": {"matchLabels": {NAME_LABEL: deployment.name}},
        "progressDeadlineSeconds": deployment.start_timeout_s + 600,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": {"metadata": {"labels": _labels(deployment)}, "spec": _pod(deployment)},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _meta(deployment), "spec": spec}


def _pod(deployment: Deployment) -> Plain:
    pod: Plain = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT, which vLLM reads
        "terminationGracePeriodSeconds": LEAVE_S + deployment.drain_s + 20,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(deployment)],
        "volumes": _volumes(deployment),
    }  # fmt: skip
    return {**pod, "initContainers": [_download(deployment)]} if deployment.model_repo else pod


def _container(deployment: Deployment) -> Plain:
    return {
        "name": "vllm",
        "image": deployment.image,
        "command": ["python3", "-m", MODULE],
        "args": list(container_args(deployment, MODEL_PATH)),
        "env": pod_env(deployment),
        "ports": [{"name": "http", "containerPort": deployment.port}],
        "resources": resources(deployment),
        **probes(deployment),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "securityContext": LOCKED,
        "volumeMounts": [{"name": "model", "mountPath": MODEL_PATH, "readOnly": True}, *SCRATCH_MOUNTS],
    }


LOCKED: Plain = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
SCRATCH_MOUNTS: list[Plain] = [
    {"name": "cache", "mountPath": HOME},
    {"name": "tmp", "mountPath": "/tmp"},
    {"name": "shm", "mountPath": "/dev/shm"},
]


def pod_env(deployment: Deployment) -> list[Plain]:
    """The measured environment; on a CPU as many threads as were measured, not bound; HOME where a user may write."""
    env = container_env(deployment) | {"HOME": HOME, "USER": "vllm"}  # torch asks for the user's name
    if not deployment.cuda:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(deployment.cores)}
    return [{"name": name, "value": value} for name, value in env.items()]


def resources(deployment: Deployment) -> Plain:
    """The measured cores and memory, or GPUs; requests and limits are the same, so that nothing is squeezed."""
    amounts: Plain = {}
    if deployment.cuda:
        amounts |= {"nvidia.com/gpu": deployment.gpus}
    else:
        amounts |= {"cpu": str(deployment.cores)}
    if deployment.memory_bytes is not None:
        amounts |= {"memory": f"{deployment.memory_bytes // 2**20}Mi"}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def probes(deployment: Deployment) -> Plain:
    """The start may take three times what was measured; then a server that is silent for a minute is started again."""
    get: Plain = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**get, "periodSeconds": 5, "failureThreshold": math.ceil(deployment.start_timeout_s / 5)},
        "readinessProbe": {**get, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**get, "periodSeconds": 10, "failureThreshold": 6},
    }


def _volumes(deployment: Deployment) -> list[Plain]:
    if deployment.model_repo:
        model: Plain = {"name": "model", "emptyDir": {"sizeLimit": _disk(deployment)}}
    else:
        model = {"name": "model", "persistentVolumeClaim": {"claimName": claim(deployment), "readOnly": True}}
    shared: Plain = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    return [model, {"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}, shared]


def _download(deployment: Deployment) -> Plain:
    """Fetches the checkpoint with the Hub client that vLLM's image carries."""
    token = {"secretKeyRef": {"name": f"{deployment.name}-hub", "key": "HF_TOKEN", "optional": True}}
    return {
        "name": "model", "image": deployment.image,
        "command": ["hf", "download", str(deployment.model_repo), "--local-dir", MODEL_PATH],
        "env": [{"name": "HOME", "value": HOME}, {"name": "HF_TOKEN", "valueFrom": token}],
        "securityContext": LOCKED,
        "volumeMounts": [{"name": "model", "mountPath": MODEL_PATH}, *SCRATCH_MOUNTS],
    }  # fmt: skip


# --- around it ----------
def _service(deployment: Deployment) -> Plain:
    ports = [{"name": "http", "port": deployment.port, "targetPort": "http"}]
    spec: Plain = {"selector": {NAME_LABEL: deployment.name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(deployment), "spec": spec}


def _disruption(deployment: Deployment) -> Plain:
    spec: Plain = {"maxUnavailable": 1, "selector": {"matchLabels": {NAME_LABEL: deployment.name}}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _meta(deployment), "spec": spec}


def _autoscaler(deployment: Deployment) -> Plain:
    """Up when requests wait; down only when fewer pods would do for those that run (else each lull would end a pod that
    the next minute needs). One pod more in the time that one takes to start, five quiet minutes before one less."""
    up: Plain = {"type": "Pods", "value": 1, "periodSeconds": min(1800, max(60, math.ceil(deployment.startup_s)))}
    spec: Plain = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment.name},
        "minReplicas": 1,
        "maxReplicas": deployment.max_replicas,
        "metrics": [
            _pods_metric("vllm_num_requests_waiting", max(1, deployment.concurrency // 4)),
            _pods_metric("vllm_num_requests_running", max(1, math.floor(0.8 * deployment.concurrency))),
        ],
        "behavior": {"scaleUp": {"policies": [up]}, "scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": _meta(deployment), "spec": spec,
    }  # fmt: skip


def _pods_metric(name: str, average: int) -> Plain:
    target: Plain = {"type": "AverageValue", "averageValue": str(average)}
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


def _adapter_rules() -> Plain:
    """https://github.com/kubernetes-sigs/prometheus-adapter/blob/master/docs/config.md"""
    rules: list[Plain] = [
        {
            "seriesQuery": f'vllm:num_requests_{state}{{namespace!="",pod!=""}}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
            "name": {"matches": "^vllm:(.*)$", "as": "vllm_${1}"},
            "metricsQuery": "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
        }
        for state in ("waiting", "running")
    ]
    return {"rules": {"custom": rules}}


# --- the volume ----------
def claim(deployment: Deployment) -> str:
    """Name of the claim that holds the checkpoint."""
    return f"{deployment.name}-model"


def _disk(deployment: Deployment) -> str:
    """A fifth more than the weights, for tokenizer and configs; at least 1 GiB."""
    return f"{max(1, math.ceil(1.2 * deployment.disk_bytes / GIB))}Gi"


def model_volume(deployment: Deployment) -> str:
    """A claim, and a pod that holds it while the checkpoint is copied in."""
    name, loader = claim(deployment), f"{deployment.name}-loader"
    steps = (
        "1. kubectl apply -f model-volume.yaml",
        f"2. kubectl wait --for=condition=Ready pod/{loader}",
        f"3. kubectl cp {deployment.folder}/. {loader}:{MODEL_PATH}",
        f"4. kubectl delete pod {loader}",
        "Pods on several nodes need an access mode that your storage class offers, ReadWriteMany say.",
    )
    volume: Plain = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _disk(deployment)}}},
    }  # fmt: skip
    container: Plain = {
        "name": "loader", "image": deployment.image, "command": ["sleep", "infinity"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "model", "mountPath": MODEL_PATH}],
    }  # fmt: skip
    pod: Plain = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": loader},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID},
            "containers": [container],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": name}}],
        },
    }  # fmt: skip
    return head(deployment, "Volume of the checkpoint", *steps) + to_yaml(volume, pod)
