"""A pod that serves the measured variant, as Kubernetes and KServe both want it: threads, resources, probes, end."""

import math

from qserve.serve.deployment import MODULE, Deployment
from qserve.serve.export_container import container_args, container_env
from qserve.serve.export_text import Plain

LEAVE_S = 10  # a pod that stops is still sent requests until every proxy has heard of it
MODEL_PATH = "/models"
HOME = "/cache"
USER_ID = 1000
POD_SECURITY: Plain = {
    "runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
LOCKED: Plain = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
SCRATCH_MOUNTS: list[Plain] = [
    {"name": "cache", "mountPath": HOME},
    {"name": "tmp", "mountPath": "/tmp"},
    {"name": "shm", "mountPath": "/dev/shm"},
]
SCRATCH_VOLUMES: list[Plain] = [
    {"name": "cache", "emptyDir": {}},
    {"name": "tmp", "emptyDir": {}},
    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
]


def grace_s(deployment: Deployment) -> int:
    """Leaving the Service, finishing requests, and the end of the processes."""
    return LEAVE_S + deployment.drain_s + 20


def _env(deployment: Deployment) -> list[Plain]:
    """The measured environment; on a CPU as many threads as were measured, not bound; HOME where a user may write."""
    env = container_env(deployment) | {"HOME": HOME, "USER": "vllm"}  # torch asks for the user's name
    if not deployment.cuda:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(deployment.cores)}
    return [{"name": name, "value": value} for name, value in env.items()]


def container(deployment: Deployment, name: str, model_path: str) -> Plain:
    """vLLM with the measured settings, and the places where it may write; the model is mounted at `model_path`."""
    return {
        "name": name,
        "image": deployment.image,
        "command": ["python3", "-m", MODULE],
        "args": list(container_args(deployment, model_path)),
        "env": _env(deployment),
        "ports": [{"name": "http", "containerPort": deployment.port, "protocol": "TCP"}],
        "resources": _resources(deployment),
        **_probes(deployment),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "securityContext": LOCKED,
        "volumeMounts": SCRATCH_MOUNTS,
    }


def _resources(deployment: Deployment) -> Plain:
    """The measured cores and memory, or GPUs; requests and limits are the same, so that nothing is squeezed."""
    amounts: Plain = {}
    if deployment.cuda:
        amounts |= {"nvidia.com/gpu": deployment.gpus}
    else:
        amounts |= {"cpu": str(deployment.cores)}
    if deployment.memory_bytes is not None:
        amounts |= {"memory": f"{deployment.memory_bytes // 2**20}Mi"}
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _probes(deployment: Deployment) -> Plain:
    """The start may take three times what was measured; then a server that is silent for a minute is started again."""
    get: Plain = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**get, "periodSeconds": 5, "failureThreshold": math.ceil(deployment.start_timeout_s / 5)},
        "readinessProbe": {**get, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**get, "periodSeconds": 10, "failureThreshold": 6},
    }


def wait_target(deployment: Deployment) -> int:
    """Requests that may wait at each server: a quarter of those that it takes at once."""
    return max(1, deployment.concurrency // 4)


def run_target(deployment: Deployment) -> int:
    """Requests that run at each server, with a fifth of its places left."""
    return max(1, math.floor(0.8 * deployment.concurrency))
