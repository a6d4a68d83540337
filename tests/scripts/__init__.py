"""Plain training scripts, and faults as small changes of their text.

``programs/NAME.py`` is a script as people write them, ``NAME.toml`` beside it its faults: a text of the
script, what stands in its place, the kind of the fault, and what has to be named first; and rewrites, texts
in whose places others stand that compute the same, of which nothing may be named.
"""

from .bank import KEPT_APART as KEPT_APART
from .bank import KINDS as KINDS
from .bank import NAMES as NAMES
from .bank import Rewrite as Rewrite
from .bank import ScriptFault as ScriptFault
from .bank import faults_of as faults_of
from .bank import names_truth as names_truth
from .bank import rank_of as rank_of
from .bank import record_script as record_script
from .bank import rewrites_of as rewrites_of
from .bank import says_truth as says_truth
from .bank import text_of as text_of
