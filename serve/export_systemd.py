"""systemd: a service on the measured machine itself, with the environment and the cores that were measured.

man systemd.service, systemd.exec, systemd.kill. MemoryDenyWriteExecute stays off: torch makes code as it runs.
"""

import re

from qserve.errors import UsageError
from qserve.serve.deployment import MODULE, Deployment
from qserve.serve.export_dashboard import dashboard
from qserve.serve.export_monitoring import alert_rules, scrape_static
from qserve.serve.export_text import head

WAIT = """until "$0" -c "import urllib.request as u; u.urlopen('$1', timeout=5)" 2>/dev/null; do sleep 1; done"""
HARDENING = (
    "NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectHome=read-only", "ProtectClock=yes", "ProtectHostname=yes",
    "ProtectKernelLogs=yes", "ProtectKernelModules=yes", "ProtectKernelTunables=yes",
    "ProtectControlGroups=yes", "RestrictNamespaces=yes", "RestrictRealtime=yes", "RestrictSUIDSGID=yes",
    "LockPersonality=yes", "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", "UMask=0077",
)  # fmt: skip


def systemd(deployment: Deployment, user: str) -> dict[str, str]:
    """{file name: text}. `user` must be able to read the checkpoint and the environment."""
    unit = f"{deployment.name}.service"
    install = (
        "Install:",
        f"$ cp {unit} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {unit}",
        f"It runs as {user}, the owner of the checkpoint. Start waits until /health answers; stop lets requests end.",
    )
    return {
        unit: head(deployment, "systemd service", *install) + _unit(deployment, user),
        "prometheus.yml": scrape_static(deployment, f"127.0.0.1:{deployment.port}"),
        "alerts.yml": alert_rules(deployment),
        "dashboard.json": dashboard(deployment),
    }


def _unit(deployment: Deployment, user: str) -> str:
    sections = {
        "Unit": (f"Description=vLLM with {_plain(deployment.model)}, as qserve measured it",
                 "Wants=network-online.target", "After=network-online.target",
                 "StartLimitIntervalSec=0"),
        "Service": _service(deployment, user),
        "Install": ("WantedBy=multi-user.target",),
    }  # fmt: skip
    return "\n".join("\n".join((f"[{name}]", *lines, "")) for name, lines in sections.items())


def _service(deployment: Deployment, user: str) -> tuple[str, ...]:
    python = str(deployment.python)
    command = (python, "-m", MODULE, *deployment.command_args(str(deployment.folder), "127.0.0.1"))
    url = f"http://127.0.0.1:{deployment.port}/health"
    memory = () if deployment.memory_bytes is None else (f"MemoryMax={deployment.memory_bytes}",)
    cache = f"%C/{deployment.name}"
    return (
        "Type=exec",
        f"User={user}",
        f"CacheDirectory={deployment.name}",
        *(f"Environment={quote(f'{name}={value}')}" for name, value in deployment.env.items()),
        f"Environment=HOME={cache} XDG_CACHE_HOME={cache} XDG_CONFIG_HOME={cache}",
        "ExecStart=" + " ".join(quote(arg) for arg in command),
        "ExecStartPost=" + " ".join(quote(arg) for arg in ("/bin/sh", "-c", WAIT, python, url)),
        f"TimeoutStartSec={deployment.start_timeout_s}",
        "KillSignal=SIGTERM",
        "KillMode=mixed",  # the API server alone gets SIGTERM: it drains, and ends its workers itself
        f"TimeoutStopSec={deployment.drain_s + 20}",
        "SuccessExitStatus=0 143",
        "Restart=on-failure",
        "RestartSec=5",
        "LimitNOFILE=65536",
        *memory,
        *HARDENING,
        "ReadWritePaths=/tmp" if _under_tmp(deployment) else "PrivateTmp=yes",  # vLLM's processes meet in /tmp
    )


def _under_tmp(deployment: Deployment) -> bool:
    """Whether the checkpoint or the environment lies where a private /tmp would hide it."""
    return any(str(path).startswith(("/tmp/", "/var/tmp/")) for path in (deployment.folder, deployment.python))


def quote(text: str) -> str:
    """One word of a command line: specifiers (%) and variables ($) are doubled, the rest quoted as in C.

    Raises:
        UsageError: it holds a line break, which no unit file can carry.
    """
    if re.search(r"[\r\n\0]", text):
        raise UsageError(f"{text!r} cannot stand in a systemd unit: it holds a line break")
    doubled = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return doubled if re.fullmatch(r"[\w@%+=:,./-]+", doubled) else f'"{doubled}"'


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", " ", text)
