"""A GGUF file is looked at before it is kept: types, what stands in for them, scales, size."""

import struct
from pathlib import Path

import numpy as np
import pytest

from qserve.errors import WorkerError
from qserve.prep.gguf import TENSOR_TYPES, read_gguf
from qserve.prep.verify_gguf import verify_gguf

Tensors = dict[str, tuple[str, tuple[int, ...]]]
CODES = {name: (code, block, size) for code, (name, block, size) in TENSOR_TYPES.items()}
Q4_K_M: Tensors = {
    "token_embd.weight": ("Q6_K", (256, 8)), "blk.0.attn_q.weight": ("Q4_K", (256, 4)),
    "blk.0.ffn_down.weight": ("Q6_K", (512, 2)), "blk.0.attn_norm.weight": ("F32", (256,)),
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, tensors: Tensors, spoil: int | None = None) -> int:
    """A file with tensors of these types and zero bytes; `spoil`: a byte of the last tensor's data, from its start, at
    which a float16 infinity is put. Returns how many values there are.
    """
    rows, data, count = b"", b"", 0
    for name, (kind, shape) in tensors.items():
        code, block, size = CODES[kind]
        rows += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, len(data))
        body = bytearray(int(np.prod(shape)) // block * size)
        if spoil is not None and name == list(tensors)[-1]:
            body[spoil : spoil + 2] = b"\x00\x7c"
        data += bytes(body) + bytes(-len(body) % 32)
        count += int(np.prod(shape))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama") + rows
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return count


def test_the_tensors_and_where_they_lie(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", Q4_K_M)
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert [(t.kind, t.shape, t.size_bytes) for t in tensors] == [
        ("Q6_K", (256, 8), 8 * 210), ("Q4_K", (256, 4), 4 * 144), ("Q6_K", (512, 2), 4 * 210), ("F32", (256,), 1024),
    ]  # fmt: skip
    assert all(t.start % 32 == 0 for t in tensors)
    assert tensors[-1].start + 1024 == (tmp_path / "m.gguf").stat().st_size


def test_what_was_asked_for_is_kept_and_weighed(tmp_path: Path) -> None:
    count = write_gguf(tmp_path / "m.gguf", Q4_K_M)
    found = verify_gguf("q4", tmp_path / "m.gguf", "q4_k_m", count)
    assert found.targets == ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")
    assert (found.fallback, found.note) == ((), None)
    weights = found.weights
    assert (weights.embedding_bytes, weights.quantized_bytes, weights.other_bytes) == (1680, 576 + 840, 1024)
    assert weights.bits_per_parameter == pytest.approx(8 * (1680 + 576 + 840 + 1024) / count)


def test_rows_that_do_not_fit_are_told(tmp_path: Path) -> None:
    narrow: Tensors = {**Q4_K_M, "blk.0.attn_q.weight": ("Q5_0", (576, 4)), "token_embd.weight": ("Q8_0", (576, 8))}
    count = write_gguf(tmp_path / "m.gguf", narrow)
    found = verify_gguf("q4", tmp_path / "m.gguf", "q4_k_m", count)
    assert set(found.fallback) == {"token_embd.weight", "blk.0.attn_q.weight"}
    assert found.note is not None
    assert "2 of 3 matrices as Q5_0 and Q8_0 instead: their rows, 576 wide" in found.note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blk.0.attn_q.weight": ("Q5_0", (256, 4))}, "attn_q.weight is Q5_0, and q4_k_m was asked for"),
        ({"blk.0.attn_q.weight": ("F16", (256, 4))}, "attn_q.weight is F16"),
        ({"blk.1.attn_q.weight": ("Q4_K", (256, 8))}, "values, and the source has 4,352"),
    ],
)
def test_another_type_is_not_kept(tmp_path: Path, changes: Tensors, words: str) -> None:
    write_gguf(tmp_path / "m.gguf", {**Q4_K_M, **changes})
    with pytest.raises(WorkerError, match=f"q4: the checkpoint is not right and was not kept: .*{words}"):
        verify_gguf("q4", tmp_path / "m.gguf", "q4_k_m", 4352)


# Where a scale stands in the second block of a tensor of two, and a byte that is none.
@pytest.mark.parametrize(
    ("kind", "type", "scale", "packed"),
    [
        ("Q4_K", "q4_k_m", 144 + 2, 144 + 20), ("Q6_K", "q6_k", 210 + 208, 210), ("Q8_0", "q8_0", 34, 34 + 2),
        ("Q5_K", "q5_k_m", 176, 176 + 30), ("Q4_0", "q4_0", 18, 18 + 4), ("F16", "f16", 8, None),
    ],
)  # fmt: skip
def test_an_infinite_scale_is_found(tmp_path: Path, kind: str, type: str, scale: int, packed: int | None) -> None:
    path = tmp_path / "m.gguf"
    count = write_gguf(path, {"blk.0.attn_q.weight": (kind, (512, 1))}, spoil=scale)
    with pytest.raises(WorkerError, match=r"attn_q\.weight holds NaN or infinity"):
        verify_gguf("v", path, type, count)  # type: ignore[arg-type]
    if packed is not None:
        write_gguf(path, {"blk.0.attn_q.weight": (kind, (512, 1))}, spoil=packed)
        assert verify_gguf("v", path, type, count).targets == ("blk.0.attn_q.weight",)  # type: ignore[arg-type]
