"""Checks whether this machine, or the cloud account, is ready to train; every check has its fix. Changes nothing, and
loads torch only in a child process. May import diagnose and below."""
