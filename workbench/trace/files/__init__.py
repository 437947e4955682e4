"""Files that several processes write and read. The rest of the package reads and writes records with these functions.

- `append`: append whole lines, with an error that names a full disk.
- `atomic`: replace a file in one step, so that a reader sees the old one or the new one.
- `lock`: one process at a time.
- `text`: read text and JSON that may be damaged, too large or half written.

Imports nothing else of `trace`. Begin with `atomic`.
"""
