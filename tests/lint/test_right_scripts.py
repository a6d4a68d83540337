"""Nothing is found in scripts that use mixed precision as they should."""

import pytest
from tests.lint.right_scripts import SCRIPTS

from roundoff.lint import LintConfig, lint_paths


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_found_in_a_right_script(name, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPTS[name])
    result = lint_paths([file], LintConfig())
    assert result.unread == ()
    assert [(f.code, f.line) for f in result.findings] == []
