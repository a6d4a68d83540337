"""The programs are run by the tests, not collected."""

collect_ignore = ["programs"]
