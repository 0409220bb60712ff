for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].dataset.value;
    return text === undefined || text === "" ? null : Number(text);
  };
  const compare = (column, sign) => (a, b) => {
    const [x, y] = [value(a, column), value(b, column)];
    if (x === null && y === null) {
      return sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
    }
    return x === null ? 1 : y === null ? -1 : sign * (x - y);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...[...body.rows].sort(compare(column, down ? -1 : 1)));
    });
  });
}
