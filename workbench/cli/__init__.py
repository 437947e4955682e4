"""The command line: `workbench COMMAND`.

`main` holds the parser and the short commands; every other module is one command. A module here parses options and prints; what it does
is in the packages below. numpy and torch are imported when a command needs them, so that `--help` is quick.
"""
