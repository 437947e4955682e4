"""The command line: `workbench COMMAND`.

`main` holds the parser and the short commands. Every other module is one command. A module here parses options
and prints results; the packages below do the work. numpy and torch are imported when a command needs them, so
`--help` is fast. Begin with `main`.
"""
