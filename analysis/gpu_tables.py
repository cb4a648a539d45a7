"""Tables with nothing but the standard library: a GPU machine may have only torch, triton and numpy."""

import csv
from pathlib import Path

Row = dict[str, object]


def print_table(rows: list[Row]) -> None:
    """Columns as wide as they need be; a column that a row lacks is left blank."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_csv(path: str | Path, rows: list[Row]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
