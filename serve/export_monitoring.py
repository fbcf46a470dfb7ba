"""Prometheus: what to scrape, and the alerts of the SLO. Metric names as of vLLM 0.32 (vllm/v1/metrics/loggers.py).

https://prometheus.io/docs/prometheus/latest/configuration/configuration/
"""

from qserve.serve.deployment import Deployment, Limit
from qserve.serve.export_text import Plain, head, to_yaml

SCRAPE_S = 15


def scrape_static(deployment: Deployment, target: str) -> str:
    """prometheus.yml for one server at HOST:PORT."""
    job: Plain = {"job_name": deployment.name, "static_configs": [{"targets": [target]}]}
    return _prometheus(deployment, job)


def scrape_pods(deployment: Deployment, label: str) -> str:
    """prometheus.yml inside a cluster: every pod that carries the label; `namespace` and `pod` for the adapter."""
    meta = "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in label)
    job: Plain = {
        "job_name": deployment.name,
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [
            {"source_labels": [meta], "regex": deployment.name, "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_container_port_number"], "regex": str(deployment.port),
             "action": "keep"},
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        ],
    }  # fmt: skip
    return _prometheus(deployment, job)


def _prometheus(deployment: Deployment, job: Plain) -> str:
    config: Plain = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [job],
    }
    return head(deployment, "Prometheus: scrape config") + to_yaml(config)


def selector(deployment: Deployment) -> str:
    """The label matcher of this model's series."""
    return '{model_name="' + deployment.model + '"}'


def p95(deployment: Deployment, metric: str, window: str) -> str:
    """PromQL: 95th percentile of a histogram in seconds."""
    rate = f"rate({metric}_bucket{selector(deployment)}[{window}])"
    return f"histogram_quantile(0.95, sum by (le) ({rate}))"


TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"


def alert_rules(deployment: Deployment) -> str:
    """alerts.yml: the latencies of the SLO, requests that wait, a full KV cache, no server."""
    this = selector(deployment)
    rules = [
        *_late(deployment, "TimeToFirstToken", TTFT, deployment.ttft),
        *_late(deployment, "InterTokenLatency", ITL, deployment.itl),
        _rule("RequestsWait", f"avg(vllm:num_requests_waiting{this}) > {deployment.concurrency}", "5m",
              f"more requests wait than a server takes at once ({deployment.concurrency})"),
        _rule("KvCacheFull", f"max(vllm:kv_cache_usage_perc{this}) > 0.95", "10m", "the KV cache is over 95 % full"),
        _rule("Down", f'max(up{{job="{deployment.name}"}}) < 1 or absent(up{{job="{deployment.name}"}})', "2m",
              "no server answers"),
    ]  # fmt: skip
    groups: Plain = {"groups": [{"name": deployment.name, "rules": rules}]}
    return head(deployment, "Prometheus: alerts") + to_yaml(groups)


def _late(deployment: Deployment, name: str, metric: str, limit: Limit | None) -> list[Plain]:
    if limit is None:
        return []
    summary = f"p95 of {metric} is over {limit.seconds:g} s ({limit.origin})"
    return [_rule(name, f"{p95(deployment, metric, '5m')} > {limit.seconds:g}", "5m", summary)]


def _rule(name: str, expression: str, lasting: str, summary: str) -> Plain:
    return {
        "alert": f"Qserve{name}", "expr": expression, "for": lasting, "labels": {"severity": "warning"},
        "annotations": {"summary": summary},
    }  # fmt: skip
