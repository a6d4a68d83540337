"""The labelled scripts are read by the tests, not collected."""

collect_ignore = ["corpus", "apart"]
