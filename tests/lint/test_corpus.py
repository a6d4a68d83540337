"""How often findings are right on labelled scripts, and how many mistakes are found."""

import pytest
from tests.lint.labelled import APART, CORPUS, Label, LabelledScript, score, scripts

from roundoff.lint import LintConfig, lint_paths

#: The least share of findings that are right, and of mistakes that are found.
PRECISION = 0.95
RECALL = 0.90


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Each script of the corpus with its findings."""
    folder = tmp_path_factory.mktemp("corpus")
    answer = []
    for script in scripts(CORPUS):
        file = folder / script.name
        file.write_text(script.text)
        answer.append((script, lint_paths([file], LintConfig()).findings))
    return answer


def test_there_are_enough_scripts_and_as_many_right_as_wrong_in_style():
    labelled = [*scripts(CORPUS), *scripts(APART)]
    assert len(labelled) >= 60
    right = [each for each in labelled if each.name.startswith("right_")]
    assert 0.35 <= len(right) / len(labelled) <= 0.65


def test_findings_are_right(results):
    scores = score(results)
    assert scores.precision() >= PRECISION, scores.wrong_places


def test_mistakes_are_found(results):
    scores = score(results)
    assert scores.recall() >= RECALL, scores.missed_places


def test_labels_are_taken_off():
    (script,) = [each for each in scripts(CORPUS) if each.name == "wrong_ppo.py"]
    assert "expect" not in script.text
    assert Label(36, "RO611") in script.labels


def test_a_finding_counts_once(results):
    finding = next(each for _, findings in results for each in findings)
    script = LabelledScript("one", "", (Label(finding.line + 1, finding.code),))
    scores = score([(script, [finding, finding])])
    assert (scores.right.total(), scores.wrong.total()) == (1, 1)
    assert scores.precision() == 0.5
    assert scores.recall() == 1.0
