"""placeholder"""

from roundoff.lint import Script
from roundoff.migrate.result import Migration


def to_npu_bridge(script: Script) -> Migration:
    return Migration(script.path, script.text, script.text)


def from_npu_bridge(script: Script) -> Migration:
    return Migration(script.path, script.text, script.text)
