"""qserve: which quantization of this model should I deploy on this machine for this traffic?"""

__version__ = "0.1.0"
