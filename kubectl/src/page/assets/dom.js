// Elements, texts and tables. Texts of others become text nodes, and nothing else.

/** Makes an element. Children are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Makes an element of a picture. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

// Controls, marks that turn the direction of text, and separators that look like none.
const hidden = /[\p{C}\p{Zl}\p{Zp}]/gu;

/** A text in which everything can be seen. */
export function visible(text) {
  return String(text).replace(hidden, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/** A name, which stays apart from the text around it. */
export function name(text) {
  return el("bdi", {}, text === "" ? "-" : text);
}

/** The address of a view. */
export function address(view, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  return `#${view}${query.size ? `?${query}` : ""}`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

export function number(count) {
  return count.toLocaleString("en");
}

/** A time span in its two largest units. */
export function span(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  return units.slice(first, first + 2).map(([unit, size], at) => {
    const count = Math.floor(at ? (seconds % units[first][1]) / size : seconds / size);
    return at && !count ? "" : `${count} ${unit}`;
  }).join(" ").trim();
}

/** A point in time, and how long ago it was. */
export function ago(ms, now) {
  if (!ms) return "-";
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return "-";
  const stamp = date.toISOString();
  return el("time", { datetime: stamp, title: stamp }, `${span(Math.max(0, (now - ms) / 1000))} ago`);
}

/**
 * A table whose heads sort it, and that shows some rows at a time. Columns have `title`, `cell(row)` and, if they sort,
 * `value(row)`.
 */
export class Table {
  constructor(place, { caption, columns, key, order, isDescending = false, empty, rowClass }) {
    Object.assign(this, { columns, key, order, isDescending, empty, rowClass, rows: [], shown: ROWS });
    this.body = el("tbody", { role: "rowgroup" });
    this.heads = columns.map((column) => this.#head(column));
    const head = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, this.heads));
    this.table = el("table", { role: "table" }, el("caption", {}, caption), head, this.body);
    this.none = el("p", { class: "note", hidden: true }, empty);
    this.more = el("button", { type: "button", hidden: true });
    this.more.addEventListener("click", () => {
      const first = this.shown;
      this.shown += ROWS;
      this.#draw();
      this.body.children[first]?.querySelector("a, button, summary")?.focus();
    });
    place.replaceChildren(this.table, this.none, this.more);
  }

  #head(column) {
    const head = el("th", { scope: "col", role: "columnheader", class: column.isNumber ? "number" : undefined });
    if (!column.value) {
      head.append(column.title);
      return head;
    }
    const button = el("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      this.isDescending = this.order === column ? !this.isDescending : Boolean(column.isNumber);
      this.order = column;
      this.#draw();
    });
    head.append(button);
    return head;
  }

  /** Shows these rows, in the order of the column that was chosen. */
  show(rows) {
    this.rows = rows;
    this.#draw();
  }

  #draw() {
    let rows = this.rows;
    const order = this.order;
    if (order) {
      const sign = this.isDescending ? -1 : 1;
      rows = [...rows].sort((a, b) => sign * compare(order.value(a), order.value(b)));
    }
    this.columns.forEach((column, at) => {
      if (column !== order) this.heads[at].removeAttribute("aria-sort");
      else this.heads[at].setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
    });
    const place = this.#focused();
    this.body.replaceChildren(...rows.slice(0, this.shown).map((row) => this.#row(row)));
    this.#focus(place);
    this.table.hidden = rows.length === 0;
    this.none.hidden = rows.length > 0;
    this.more.hidden = rows.length <= this.shown;
    this.more.textContent = `Show ${Math.min(ROWS, rows.length - this.shown)} more of ${number(rows.length)}`;
  }

  #row(row) {
    const cells = this.columns.map((column) => {
      const attributes = { "data-of": column.title, role: "cell", class: column.isNumber ? "number" : undefined };
      return el("td", attributes, el("div", {}, column.cell(row)));
    });
    return el("tr", { role: "row", "data-key": this.key(row), class: this.rowClass?.(row) || undefined }, cells);
  }

  // Rows are made again with each answer: focus and what is unfolded stay where they were.
  #focused() {
    const open = new Set([...this.body.querySelectorAll("details[open]")].map((one) => one.closest("tr").dataset.key));
    const row = this.body.contains(document.activeElement) ? document.activeElement.closest("tr") : null;
    const at = row ? [...row.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
    return { open, key: row?.dataset.key, at };
  }

  #focus({ open, key, at }) {
    for (const row of this.body.children) {
      if (open.has(row.dataset.key)) {
        for (const one of row.querySelectorAll("details")) one.open = true;
      }
      if (row.dataset.key === key) row.querySelectorAll(FOCUSABLE)[at]?.focus({ preventScroll: true });
    }
  }
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

const FOCUSABLE = "a, button, summary";
const ROWS = 100;
