"""A config that transformers 4 reads rightly, for the backends that need it.

transformers 5 keeps rope_theta inside `rope_parameters` and says `dtype`. transformers 4 ignores both without a word:
its rope_theta falls back to 10000, and calibration sees a broken model. The older spellings are rope_theta and
rope_scaling beside each other, and torch_dtype; newer stacks read them too. What such a backend writes carries both
spellings, because it is also loaded by the backend.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from qserve.errors import PreflightError
from qserve.prep.headers import INDEX, weight_files
from qserve.variants import Backend

ON_TRANSFORMERS_4: tuple[Backend, ...] = ("autoawq", "autogptq")
Config = Mapping[str, object]


def with_older_spellings(config: Config) -> dict[str, object]:
    """The config with the fields of transformers 4 added where they are missing.

    Raises:
        PreflightError: positions are rotated in a way that transformers 4 cannot say.
    """
    out = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping):
        if not isinstance(rope.get("rope_theta"), int | float):
            raise PreflightError("the model rotates positions by kind of layer, which transformers 4 cannot read")
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        out.setdefault("rope_theta", rope["rope_theta"])
        if scaling.get("rope_type", "default") != "default":
            out.setdefault("rope_scaling", scaling)
    if isinstance(config.get("dtype"), str):
        out.setdefault("torch_dtype", config["dtype"])
    return out


def write_view(baseline: Path, out: Path) -> Path:
    """A folder with the baseline's weights and a config of older spellings alone. No tokenizer: ids are handed over."""
    out.mkdir()
    for path in (*weight_files(baseline), *baseline.glob(INDEX)):
        try:
            os.link(path, out / path.name)
        except OSError:
            shutil.copyfile(path, out / path.name)
    config = with_older_spellings(json.loads((baseline / "config.json").read_bytes()))
    older = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    (out / "config.json").write_text(json.dumps(older, indent=2) + "\n", encoding="utf-8")
    return out
