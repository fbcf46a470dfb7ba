"""`qserve info URL`: what a running server is."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from qserve.app import app


class InfoFormat(StrEnum):
    text = "text"
    json = "json"


@app.command()
def info(
    url: Annotated[str, typer.Argument(help="Base URL of a running server.")],
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "OPENAI_API_KEY",
    format: Annotated[InfoFormat, typer.Option(help="How to print it.")] = InfoFormat.text,
) -> None:
    """Say what a running server is.

    Model, engine and version, context, quantization, KV capacity, load and health, from what it exposes.
    """
    from qserve.serve.info import info_text, probe

    found = probe(url, os.environ.get(api_key_env), api_key_env)
    typer.echo(found.model_dump_json(indent=2) if format is InfoFormat.json else info_text(found))
