"""Grafana: one dashboard of the SLO. The limits are drawn as lines into the latencies.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

import json

from qserve.serve.deployment import Deployment, Limit
from qserve.serve.export_monitoring import ITL, TTFT, p95, selector
from qserve.serve.export_text import Plain

SOURCE: Plain = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"


def dashboard(deployment: Deployment) -> str:
    """dashboard.json, to import by hand or to provision."""
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    made: Plain = {
        "uid": deployment.name[:40], "title": f"{deployment.model}: SLO ({deployment.name})",
        "tags": ["qserve", "vllm"],
        "description": " ".join(("Made by qserve export.", *deployment.measured)),
        "timezone": "browser", "editable": True, "schemaVersion": 39, "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]}, "panels": _panels(deployment),
    }  # fmt: skip
    return json.dumps(made, indent=2) + "\n"


def _panels(deployment: Deployment) -> list[Plain]:
    this = selector(deployment)
    waits, runs = f"sum(vllm:num_requests_waiting{this})", f"sum(vllm:num_requests_running{this})"
    hits, asked = (f"sum(rate(vllm:prefix_cache_{what}_total{this}[{WINDOW}]))" for what in ("hits", "queries"))
    tokens = [f"sum(rate(vllm:{kind}_tokens_total{this}[{WINDOW}]))" for kind in ("generation", "prompt")]
    panels = [
        _latency("Time to first token, p95", p95(deployment, TTFT, WINDOW), deployment.ttft),
        _latency("Inter-token latency, p95", p95(deployment, ITL, WINDOW), deployment.itl),
        _series("Requests", "short", [(waits, "waiting"), (runs, "running")]),
        _series("Throughput", "short", [(tokens[0], "output tokens/s"), (tokens[1], "prompt tokens/s")]),
        _series("KV cache in use", "percentunit", [(f"max(vllm:kv_cache_usage_perc{this})", "in use")]),
        _series("Prefix cache, hit tokens of queried tokens", "percentunit", [(f"{hits} / {asked}", "hit rate")]),
        _series("Requests ended", "reqps",
                [(f"sum by (finished_reason) (rate(vllm:request_success_total{this}[{WINDOW}]))",
                  "{{finished_reason}}")]),
        _series("Preemptions", "short", [(f"sum(rate(vllm:num_preemptions_total{this}[{WINDOW}]))", "a second")]),
    ]  # fmt: skip
    for n, panel in enumerate(panels):
        panel |= {"id": n + 1, "gridPos": {"x": 12 * (n % 2), "y": 8 * (n // 2), "w": 12, "h": 8}}
    return panels


def _latency(title: str, query: str, limit: Limit | None) -> Plain:
    """A latency in seconds; red above its limit, which is a dashed line."""
    panel = _series(title, "s", [(query, "p95")])
    if limit is None:
        return panel
    steps: list[Plain] = [{"color": "green", "value": None}, {"color": "red", "value": limit.seconds}]
    defaults: Plain = {
        "unit": "s", "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {"thresholdsStyle": {"mode": "dashed"}},
    }  # fmt: skip
    about = f"Limit {limit.seconds:g} s: {limit.origin}."
    return panel | {"description": about, "fieldConfig": {"defaults": defaults, "overrides": []}}


def _series(title: str, unit: str, queries: list[tuple[str, str]]) -> Plain:
    targets = [
        {"refId": "ABCDEFGH"[n], "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for n, (query, legend) in enumerate(queries)
    ]
    return {
        "type": "timeseries", "title": title, "datasource": SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
    }  # fmt: skip
