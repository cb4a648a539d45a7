"""Records as an aligned table."""

import math

from dsq.command.table import as_csv, table

RECORDS = [{"name": "a", "stash_MiB": 1.25, "note": None, "n": 1}, {"name": "bc", "stash_MiB": math.nan, "n": 1000}]


def test_columns_are_chosen_and_formatted():
    assert table(RECORDS, {"name": "", "stash_MiB": ".1f", "n": ",", "other": ".2f"}) == (
        "name      stash MiB      n    other\n"
        "------  -----------  -----  -------\n"
        "a               1.2      1        -\n"
        "bc                -  1,000        -"
    )


def test_without_columns_all_are_shown_as_they_are():
    assert table(RECORDS, markdown=True).splitlines() == [
        "| name   |   stash MiB |   note |    n |",
        "|:-------|------------:|-------:|-----:|",
        "| a      |        1.25 |      - |    1 |",
        "| bc     |           - |      - | 1000 |",
    ]


def test_nothing_is_the_head_alone():
    assert table([], {"name": ""}).splitlines()[0].strip() == "name"
    assert table([]) == ""


def test_csv_has_every_field_of_any_record():
    assert as_csv([{"a": 'x,"', "b": 1 / 3}, {"b": math.nan, "c": True, "a": None}], ".3g") == (
        'a,b,c\n"x,""",0.333,\n,,True\n'
    )
