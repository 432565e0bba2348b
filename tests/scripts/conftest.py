"""The scripts here are run by tests, not collected as tests."""

collect_ignore_glob = ["*"]
