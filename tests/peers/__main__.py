"""Writes docs/peer-tests.md: `python -m tests.peers`."""

from tests.peers import rows

if __name__ == "__main__":
    rows.PAGE.write_text(rows.page(rows.read()))
