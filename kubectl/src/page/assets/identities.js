// Every pod, host and address that is an end of a flow.

import { Table, address, ago, bytes, el, name, number } from "/dom.js";
import { label, refusals, text } from "/topology.js";

export class Identities {
  #ask;
  #answer = { rows: [], now_ms: 0 };
  #table;
  #tools = document.getElementById("identities-tools");

  constructor(ask) {
    this.#ask = ask;
    this.#table = new Table(document.getElementById("identities-table"), {
      caption: "Identities with flows",
      key: (row) => `${text(row)} ${row.identity}`,
      empty: "No identity matches.",
      rowClass: (row) => (row.refused ? "refused" : ""),
      columns: [
        { title: "Identity", value: (row) => row.identity, cell: (row) => link(row) },
        { title: "Of", value: text, cell: (row) => of(row) },
        { title: "Flows", isNumber: true, value: (row) => row.flows, cell: (row) => number(row.flows) },
        { title: "Traffic", isNumber: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
        { title: "Refused", isNumber: true, value: (row) => row.refused, cell: refusals },
        { title: "In audit", isNumber: true, value: (row) => row.audit, cell: (row) => number(row.audit) },
        { title: "Last seen", value: (row) => -row.last_ms, cell: (row) => ago(row.last_ms, this.#answer.now_ms) },
      ],
    });
    this.#tools.addEventListener("submit", (event) => event.preventDefault());
    this.#tools.addEventListener("input", () => this.#draw());
  }

  open(parameters) {
    if (parameters.has("q")) this.#tools.elements.q.value = parameters.get("q");
  }

  async refresh(signal) {
    this.#answer = await this.#ask("identities", {}, signal);
    this.#draw();
    const { left_out: leftOut } = this.#answer;
    return leftOut ? [`${number(leftOut)} identities with less traffic are left out.`] : [];
  }

  #draw() {
    const { q, refused } = this.#tools.elements;
    const wanted = q.value.trim().toLowerCase();
    this.#table.show(this.#answer.rows.filter((row) => (!refused.checked || row.refused)
      && row.identity.toLowerCase().includes(wanted)));
  }
}

function link(row) {
  const condition = row.kind === "namespace" ? "pod" : "peer";
  return el("a", { href: address("flows", { [condition]: row.identity }) }, name(row.identity));
}

function of(row) {
  if (row.kind === "namespace") return ["namespace ", label(row)];
  return row.kind === "host" ? "outside host" : "no certificate known";
}
