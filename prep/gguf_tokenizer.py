"""The tokenizer in a GGUF file of ours.

llama.cpp's converter guesses it from tokenizer.json. Of a model that came in a GGUF file it guesses wrong: what
transformers unpacks says `byte_fallback`, as SentencePiece's does, and carries no name of how text is split. So such a
file gets the fields of the file that the model came in, byte for byte.
"""

import json
import shutil
from pathlib import Path

from qserve.prep.gguf import read_gguf, read_pairs

TOKENIZER = "tokenizer."


def carry_tokenizer(source: Path, path: Path) -> None:
    """Put the tokenizer of one GGUF file into another one of the same model, in place.

    Raises:
        UsageError: one of them is no GGUF file.
    """
    whole, given = read_pairs(path), read_pairs(source)
    kept = {key: raw for key, raw in whole.pairs.items() if not key.startswith(TOKENIZER)}
    taken = {key: raw for key, raw in given.pairs.items() if key.startswith(TOKENIZER)}
    partial = path.with_name(path.name + ".partial")
    with path.open("rb") as old, partial.open("wb") as new:
        new.write(whole.head({**kept, **taken}))
        old.seek(whole.data_start)
        shutil.copyfileobj(old, new, 1 << 24)
    partial.replace(path)


def misread_tokenizer(path: Path, checkpoint: Path) -> str | None:
    """What is wrong with the kind of tokenizer that a GGUF file names; None where it is that of tokenizer.json."""
    try:
        told = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    except OSError:
        return None
    kind = read_gguf(path).fields.get("tokenizer.ggml.model")
    byte_level = told["model"].get("type") == "BPE" and '"ByteLevel"' in json.dumps(
        [told.get("pre_tokenizer"), told.get("decoder")]
    )
    if byte_level and kind != "gpt2":
        return f"its tokenizer is byte-level BPE, and the file calls it {kind!r}: llama-server could not read text"
    return None
