"""qserve: which quantization of this model should I deploy on this machine for this traffic?"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qserve.notebook import load_report

__version__ = "0.1.0"
__all__ = ["__version__", "load_report"]


def __getattr__(name: str) -> object:
    """`qserve.load_report`, imported on first use: `import qserve` stays light."""
    if name == "load_report":
        from qserve.notebook import load_report

        return load_report
    raise AttributeError(f"module 'qserve' has no attribute {name!r}")
