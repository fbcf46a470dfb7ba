"""What a server says about a text: the log-probability of each token, given those before it."""

from dataclasses import dataclass

import numpy as np

Window = tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """One window as a server scores it. The first token has no probability, so there are len(window) - 1 positions.

    logprobs: of the token that stands there, shape (positions,), nats.
    top: for each position {token id: logprob}, the server's top k and the token that stands there.
    """

    logprobs: np.ndarray
    top: tuple[dict[int, float], ...]
