"""The command line: `workbench COMMAND`.

`main` holds the parser. Every other module is one command, or a few related ones. Modules of this package parse options
and print results; the packages below do the work. numpy and torch are imported when a command needs them, so `--help`
is fast.

May import every other package. Used by `__main__` alone. Begin with `main`.
"""
