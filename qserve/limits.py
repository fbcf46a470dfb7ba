"""The largest numbers that are taken: far beyond any use, so that a slip is refused in a sentence and not tried."""

CONCURRENCY = 10_000  # requests in flight; one client has about 28,000 ports to one server
REQUESTS = 1_000_000
TOKENS = 10_000_000  # of a prompt, an answer, a context
DRAWN_TOKENS = 200_000_000  # of all prompts that `qserve load` holds in memory: 1.6 GB
RECORDS = 1_000_000_000  # rows of a data set, samples and windows of it
PAIRS = 10_000
ROUNDS = 1_000
SECONDS = 10_000_000.0
GIB = 100_000
PARTS = 10_000  # GPUs, nodes, threads, servers
