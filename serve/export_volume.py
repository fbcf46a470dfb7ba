"""The volume of the checkpoint in a cluster: a claim, and how the checkpoint gets into it."""

import math
import shlex

from qserve.serve.deployment import GIB, Deployment
from qserve.serve.export_pod import MODEL_PATH, POD_SECURITY
from qserve.serve.export_text import Plain, head, to_yaml


def claim(deployment: Deployment) -> str:
    """Name of the claim that holds the checkpoint."""
    return f"{deployment.name}-model"


def disk(deployment: Deployment) -> str:
    """A fifth more than the weights, for tokenizer and configs; at least 1 GiB."""
    return f"{max(1, math.ceil(1.2 * deployment.disk_bytes / GIB))}Gi"


def model_volume(deployment: Deployment) -> str:
    """A claim, and a pod that holds it while the checkpoint is copied in."""
    name, loader = claim(deployment), f"{deployment.name}-loader"
    steps = (
        "Before the deployment:",
        "$ kubectl apply -f model-volume.yaml",
        f"$ kubectl wait --for=condition=Ready pod/{loader}",
        f"$ kubectl cp {shlex.quote(str(deployment.folder))}/. {loader}:{MODEL_PATH}",
        f"$ kubectl delete pod {loader}",
        "Pods on several nodes need an access mode that your storage class offers, ReadWriteMany say.",
    )
    volume: Plain = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": disk(deployment)}}},
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
            "securityContext": POD_SECURITY,
            "containers": [container],
            "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": name}}],
        },
    }  # fmt: skip
    return head(deployment, "Volume of the checkpoint", *steps) + to_yaml(volume, pod)
