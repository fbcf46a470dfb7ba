"""What all containers share: vLLM's arguments and environment without what belongs to the measured machine."""

from pathlib import Path

from qserve.errors import UsageError
from qserve.serve.deployment import Deployment


def container_args(deployment: Deployment, model_path: str) -> tuple[str, ...]:
    """vLLM's arguments inside a container.

    Raises:
        UsageError: one of them is a file of the measured machine.
    """
    args = deployment.command_args(model_path, "0.0.0.0")
    for flag, value in zip(deployment.args, deployment.args[1:], strict=False):
        if Path(value).is_absolute():
            raise UsageError(f"{flag} {value} is a file of this machine, which no container has; use --for systemd")
    return args


def container_env(deployment: Deployment) -> dict[str, str]:
    """The measured environment without what points into the measured machine (a preloaded library, say)."""
    return {name: value for name, value in deployment.env.items() if not _names_a_file(value)}


def container_notes(deployment: Deployment) -> tuple[str, ...]:
    """What is not as it was measured, for the head of a file."""
    left_out = [f"{name}={value}" for name, value in deployment.env.items() if _names_a_file(value)]
    return (
        f"The image {deployment.image} itself was not measured: qserve measured vLLM in an environment of its own.",
        *(f"{what} was set when it was measured, and is left out: a file of that machine." for what in left_out),
    )


def _names_a_file(value: str) -> bool:
    return "/" in value
