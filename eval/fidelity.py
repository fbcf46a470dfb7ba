"""The first gate: does the server compute what the checkpoint says?

Served log-probabilities are compared with the same checkpoint in transformers (float32) on the same tokens. Rounding
alone moves them, so the limit comes from a measured noise floor: transformers in bfloat16 against float32, on this
checkpoint and on the baseline. The perplexities must agree as well, which rounding does not move. Greedy text is no
test: two near-tied tokens swap for no reason.

Kernels of quantized GGUF types round activations to 8 bits in blocks, of which transformers knows nothing. Emulated
there, that moves log-probabilities about twice as far as bfloat16 does (SmolLM2-135M, Q8_0 to Q4_0: 0.057 to 0.077 nats
against 0.033 to 0.043), and their mean by less than 0.004: the same limit holds.

bitsandbytes' int8 rounds activations by a rule that the reference follows. A step up or down in one layer moves what
the next one rounds, so rounding alone makes a floor of 0.14 nats there; layer by layer both agree to 0.002 %.
"""

from collections.abc import Sequence

import numpy as np

from qserve.artifacts import Artifact, Estimate, Fidelity
from qserve.eval.quality import Scored, perplexity

LIMIT_OVER_FLOOR = 3.0  # kernels sum in another order than transformers: allow thrice what rounding alone does
SMALLEST_LIMIT = 0.01  # nats; for a floor that is measured as almost nothing
LARGEST_SHIFT = 0.02  # nats; of the mean, which is the log of the perplexities' ratio: rounding does not shift it


class Reference(Artifact):
    """Log-probabilities of the windows' tokens in transformers, one list a window, in nats; in bfloat16 of the first
    windows alone."""

    float32: tuple[tuple[float, ...], ...]
    bfloat16: tuple[tuple[float, ...], ...]

    def perplexity(self) -> Estimate:
        """In float32, with its standard error between windows."""
        return perplexity(self.float32)

    def floor(self) -> float:
        """Mean absolute difference that rounding to bfloat16 makes, in nats."""
        return _mean_gap(self.float32[: len(self.bfloat16)], self.bfloat16)


def check(served: Sequence[Scored], own: Reference, baseline: Reference) -> Fidelity:
    """Compare what is served with the offline checkpoint, on the positions that both have."""
    windows = [s.logprobs for s in served[: len(own.float32)]]
    expected = [whole[: len(window)] for whole, window in zip(own.float32, windows, strict=False)]
    error = _mean_gap(windows, expected)
    floor = max(own.floor(), baseline.floor())
    limit = max(LIMIT_OVER_FLOOR * floor, SMALLEST_LIMIT)
    gaps = _flat(windows) - _flat(expected)
    chance = 4 * float(np.std(gaps)) / np.sqrt(len(gaps))  # what few tokens shift the mean by, four standard errors
    shifted = abs(float(np.mean(gaps))) > max(LARGEST_SHIFT, chance)
    return Fidelity(
        faithful=error <= limit and not shifted, error=error, floor=floor, limit=limit, tokens=len(gaps),
        reference_perplexity=perplexity(expected).value, served_perplexity=perplexity(windows).value,
    )  # fmt: skip


def why_not(gate: Fidelity) -> str:
    """What is wrong with one that is not faithful: the log-probabilities, or their mean alone."""
    apart = (
        f"served log-probabilities are {gate.error:.3f} nats from the checkpoint's in transformers (rounding explains "
        f"{gate.floor:.3f}, the limit is {gate.limit:.3f})"
    )
    shift = f"perplexity is {gate.served_perplexity:.3f} instead of {gate.reference_perplexity:.3f}"
    if gate.error > gate.limit:
        return f"{apart}, and {shift}"
    few = f" ({gate.tokens:,} tokens; more quality.windows tell it better)"
    return f"served {shift}, a shift that rounding is not expected to make{few}, though {apart}"


def _mean_gap(a: Sequence[Sequence[float] | np.ndarray], b: Sequence[Sequence[float] | np.ndarray]) -> float:
    return float(np.mean(np.abs(_flat(a) - _flat(b))))


def _flat(windows: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(window) for window in windows])
