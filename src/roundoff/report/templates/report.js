"use strict";
(() => {
  const table = document.getElementById("ranking");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const headers = Array.from(table.tHead.rows[0].cells);
  const find = document.getElementById("find");
  const format = document.getElementById("format");
  const picked = document.getElementById("picked");
  const shown = document.getElementById("shown");
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  // null where a cell has no value, so that it can stay last in either direction
  const value = (row, column, numeric) => {
    const cell = row.cells[column];
    const text = cell.dataset.v ?? cell.textContent.trim();
    if (!numeric) return text || null;
    const number = Number(text || NaN);
    return Number.isNaN(number) ? null : number;
  };

  const sort = (column) => {
    const header = headers[column];
    const numeric = header.classList.contains("n");
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const order = (a, b) => (numeric ? a - b || 0 : a.localeCompare(b, undefined, { numeric: true }));
    const keyed = rows.map((row) => [value(row, column, numeric), row]);
    keyed.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return direction * order(a, b);
    });
    body.append(...keyed.map(([, row]) => row));
  };

  const filter = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const hit =
        (!format.value || row.dataset.format === format.value) &&
        (!picked.checked || row.classList.contains("picked")) &&
        words.every((word) => texts.get(row).includes(word));
      row.hidden = !hit;
      count += hit;
    }
    shown.textContent = `${count} of ${rows.length} rows`;
  };

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = header.textContent;
    button.addEventListener("click", () => sort(column));
    header.replaceChildren(button);
  });
  headers[0].setAttribute("aria-sort", "ascending");
  const controls = document.getElementById("controls");
  controls.addEventListener("input", filter);
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.hidden = false;
  filter();
})();
