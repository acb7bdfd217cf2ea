"""Writes docs/peer-tests.md and docs/peer-tests.csv: `python -m tests.peers`."""

from tests.peers import rows

if __name__ == "__main__":
    rows.PAGE.write_text(rows.page(rows.read()))
    rows.TABLE.write_text(rows.table(rows.read()))
