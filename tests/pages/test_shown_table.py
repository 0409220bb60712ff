"""One table, shown as Markdown or with fewer columns."""

from __future__ import annotations

from adapterhub.pages.shown_table import ShownTable, TableCell, TableRow

TABLE = ShownTable(
    [("method", ""), ("score", "of the rows"), ("a|b", "")],
    [TableRow("x*y|z", [TableCell("84.1 ± 0.2", 84.1), TableCell("<img>")]),
     TableRow("lora", [TableCell(), TableCell("+3, tied (p = 0.2)")], taken=True)],
)  # fmt: skip


def test_whatever_texts_contain_stays_text_in_markdown():
    assert TABLE.markdown() == [
        r"| method | score | a\|b |",
        "|---|---:|---:|",
        r"| x\*y\|z | 84.1 ± 0.2 | \<img\> |",
        "| lora | - | +3, tied (p = 0.2) |",
    ]


def test_a_table_without_some_columns():
    smaller = TABLE.without("score", "not there")
    assert [title for title, _ in smaller.heads] == ["method", "a|b"]
    assert [[cell.text for cell in row.cells] for row in smaller.rows] == [
        ["<img>"], ["+3, tied (p = 0.2)"],
    ]  # fmt: skip
    assert smaller.rows[1].taken
