"""Kubernetes: Deployment, Service, PodDisruptionBudget, HorizontalPodAutoscaler, and the volume of the checkpoint.

Scaling is a HorizontalPodAutoscaler (autoscaling/v2, in every cluster) on vLLM's own queue, through the custom metrics
API of prometheus-adapter. KEDA would do it in one object, but a cluster without its CRDs refuses that object; without
the adapter this Deployment still runs, and only does not scale.
"""

import math

from qserve.serve.deployment import Deployment
from qserve.serve.export_container import container_notes
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_monitoring import alert_rules, scrape_pods
from qserve.serve.export_pod import (
    HOME,
    LOCKED,
    MODEL_PATH,
    POD_SECURITY,
    SCRATCH_MOUNTS,
    SCRATCH_VOLUMES,
    container,
    grace_s,
    run_target,
    wait_target,
)
from qserve.serve.export_text import Plain, head, to_yaml
from qserve.serve.export_volume import claim, disk, model_volume

NAME_LABEL = "app.kubernetes.io/instance"
ADAPTER = "prometheus-adapter-values.yaml"


def kubernetes(deployment: Deployment) -> dict[str, str]:
    """{file name: text}."""
    objects = (_deployment(deployment), _service(deployment), _disruption(deployment), _autoscaler(deployment))
    adapter = (
        "Install:",
        f"$ helm upgrade --install prometheus-adapter prometheus-community/prometheus-adapter -f {ADAPTER}",
    )
    files = {
        "kubernetes.yaml": head(deployment, "Kubernetes", *_how(deployment)) + to_yaml(*objects),
        "prometheus.yml": scrape_pods(deployment, NAME_LABEL),
        "alerts.yml": alert_rules(deployment),
        "dashboard.json": dashboard(deployment),
        ADAPTER: head(deployment, "Helm values of prometheus-adapter", *adapter) + to_yaml(_adapter_rules()),
    }
    return files if deployment.model_repo else files | {"model-volume.yaml": model_volume(deployment)}


def _how(deployment: Deployment) -> tuple[str, ...]:
    if deployment.model_repo:
        model = f"Each pod downloads {deployment.model_repo}; a token, if it needs one: secret {deployment.name}-hub."
    else:
        model = "First: fill the volume as model-volume.yaml says. Then: kubectl apply -f kubernetes.yaml"
    return (
        model,
        f"Scaling needs prometheus-adapter with {ADAPTER}, which serves vLLM's queue as a custom metric.",
        *container_notes(deployment),
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
        "terminationGracePeriodSeconds": grace_s(deployment),
        "securityContext": POD_SECURITY,
        "containers": [_container(deployment)],
        "volumes": _volumes(deployment),
    }  # fmt: skip
    return {**pod, "initContainers": [_download(deployment)]} if deployment.model_repo else pod


def _container(deployment: Deployment) -> Plain:
    mounts = [{"name": "model", "mountPath": MODEL_PATH, "readOnly": True}, *SCRATCH_MOUNTS]
    return {**container(deployment, "vllm", MODEL_PATH), "volumeMounts": mounts}


def _volumes(deployment: Deployment) -> list[Plain]:
    if deployment.model_repo:
        model: Plain = {"name": "model", "emptyDir": {"sizeLimit": disk(deployment)}}
    else:
        model = {"name": "model", "persistentVolumeClaim": {"claimName": claim(deployment), "readOnly": True}}
    return [model, *SCRATCH_VOLUMES]


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
            _pods_metric("vllm_num_requests_waiting", wait_target(deployment)),
            _pods_metric("vllm_num_requests_running", run_target(deployment)),
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
