"""The `safe-rope` command. Each subcommand is one file, imported only when it is called.

    safe-rope scan | rule | audit | compare | patches | run | env

Exit status: 0 clean, 1 findings, 2 error. Data goes to stdout, progress and logs to stderr.
"""
