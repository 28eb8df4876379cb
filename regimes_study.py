"""In a checkout, the name under which the wheel has `analysis`: the same files under both."""

from pathlib import Path

__path__ = [str(Path(__file__).with_name("analysis"))]
