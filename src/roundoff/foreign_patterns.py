"""Regular expressions that a file brings, matched where they can do no harm.

One line of a file can be an expression that takes years: ``(a+)+b``. Python's matcher
cannot be stopped from inside, and which expressions are slow cannot be seen from their
text without refusing good ones. So all of a file's are matched in one process of its
own, with a limit of time and memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = ["names_matched"]

#: Seconds of a clock for all expressions of a file; of honest ones 10,000 take 0.2 s.
SECONDS = 5.0
#: Characters of an expression: those that are written by programs list all layers.
LONGEST = 2**20

#: Reads expressions, names and how from its input; answers the names of each, or why not.
_CHILD = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, ValueError, OSError):
    pass
expressions, names, how = json.load(sys.stdin)
answer = {}
for text in expressions:
    try:
        match = getattr(re.compile(text), how)
        answer[text] = [name for name in names if match(name)]
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        answer[text] = str(error) or type(error).__name__
        break
json.dump(answer, sys.stdout)
"""


def names_matched(
    expressions: Sequence[str],
    names: Sequence[str],
    how: Literal["match", "search", "fullmatch"] = "match",
) -> Mapping[str, frozenset[str]]:
    """Return the names that each expression matches.

    Args:
        expressions: from a file; their order and repetitions do not matter.
        names: what they are held against.
        how: the function of ``re``.

    Raises:
        ValueError: an expression is none, or longer than ``LONGEST``, or matching all
            takes longer than ``SECONDS``.

    >>> names_matched(["a.*", "b"], ["ab", "ba", "c"])["a.*"]
    frozenset({'ab'})
    """
    distinct = list(dict.fromkeys(expressions))
    if not distinct or not names:
        return dict.fromkeys(distinct, frozenset())
    longest = max(distinct, key=len)
    if len(longest) > LONGEST:
        raise ValueError(f"a regular expression of {len(longest)} characters")
    answer = _answer(json.dumps([distinct, list(names), how]))
    for text, matched in answer.items():
        if isinstance(matched, str):
            raise ValueError(f"not a regular expression: {text[:60]!r}: {matched}")
    return {text: frozenset(matched) for text, matched in answer.items()}


def _answer(question: str) -> Mapping[str, list[str] | str]:
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
            encoding="utf-8",
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"its regular expressions take longer than {SECONDS:g} s to match"
        ) from error
    if process.returncode:
        raise ValueError(
            f"matching its regular expressions ended with code {process.returncode}"
        )
    answer: Mapping[str, list[str] | str] = json.loads(process.stdout)
    return answer
