"""How a rule is added: a ``Rule`` in the ``RULES`` of a theme's file in ``rules/`` (code,
name, message, why with the measured effect, wrong and right example, check), and the
file's name in ``rules/table.py``. See ``rule.py`` for what a check gets and yields.
"""

from .config import LintConfig as LintConfig
from .config import check_codes as check_codes
from .config import nearest_config as nearest_config
from .engine import parse as parse
from .events import Act as Act
from .events import Event as Event
from .events import Loop as Loop
from .files import encoded as encoded
from .files import read as read
from .findings import Finding as Finding
from .findings import FixedFile as FixedFile
from .findings import LintResult as LintResult
from .findings import Severity as Severity
from .findings import Unread as Unread
from .linting import lint_paths as lint_paths
from .linting import write_fixed as write_fixed
from .rule import Rule as Rule
from .rules.table import RULES as RULES
from .rules.table import THEMES as THEMES
from .script import Script as Script
from .script import block_of as block_of
from .things import Kind as Kind
from .things import argument_for as argument_for
