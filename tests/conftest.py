"""For all tests: Ctrl-C works in the programs they start, also where the tests run in the background of a script, which
leaves SIGINT ignored in everything below it."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
